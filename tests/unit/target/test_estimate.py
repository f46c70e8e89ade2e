"""What a trial says of the answer: half noise, so that the profile's means count for most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.profiles import shares
from vllm_kvevict.settings.config import EvictionConfig
from vllm_kvevict.target.estimate import Estimate
