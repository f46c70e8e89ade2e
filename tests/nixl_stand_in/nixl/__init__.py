"""A stand-in for the package ``nixl`` (see :mod:`nixl._api`)."""
