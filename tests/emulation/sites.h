// Barriers, atomics and waits by where they stand, so that a test can take one away and must notice.
#pragma once

#include <cstring>
#include <source_location>

#include "sanitizers.h"

namespace emulate {

using Site = std::source_location;

struct Passed {
  const char* file;
  unsigned line;
};

inline Passed passed[256];
inline int num_passed;
inline const char* removed_file = "";
inline unsigned removed_line;

// Whether the operation at this site is to be left out; remembers that it was passed.
EMULATION_UNSEEN inline bool removed(const Site& site) {
  const char* slash = std::strrchr(site.file_name(), '/');
  const Passed mine{slash ? slash + 1 : site.file_name(), site.line()};
  int known = 0;
  while (known < num_passed && (passed[known].file != mine.file || passed[known].line != mine.line)) {
    ++known;
  }
  if (known == num_passed && known < 256) passed[num_passed++] = mine;
  return mine.line == removed_line && std::strcmp(mine.file, removed_file) == 0;
}

}  // namespace emulate
