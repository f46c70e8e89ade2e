# Triton picks the one subclass it finds in a backend's namespace, so the base is reached by module.
from triton.backends import compiler


class InterpreterBackend(compiler.BaseBackend):
    """Never compiles: kernels run in Triton's interpreter."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreter"

    def parse_options(self, options):
        raise RuntimeError("This backend cannot compile: set TRITON_INTERPRET=1.")

    def add_stages(self, stages, options):
        raise RuntimeError("This backend cannot compile: set TRITON_INTERPRET=1.")

    def load_dialects(self, context):
        pass

    def get_module_map(self):
        return {}
