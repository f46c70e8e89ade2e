import os

from triton.backends import driver


class InterpreterDriver(driver.DriverBase):
    """Active only under Triton's interpreter."""

    @classmethod
    def is_active(cls):
        return os.environ.get("TRITON_INTERPRET") == "1"

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def get_benchmarker(self):
        raise RuntimeError("The interpreter's times mean nothing.")
