"""RULER's tasks in RULER's words (Hsieh et al., arXiv:2404.06654), over real English prose."""
