import subprocess
import sys


def test_the_client_loads_neither_torch_nor_gymnasium_nor_the_server():
    code = (
        "import sys, turngym_client;"
        "heavy = ('torch', 'transformers', 'gymnasium', 'numpy', 'pydantic', 'turngym_server');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_everything_promised_is_there():
    import turngym_client

    assert all(hasattr(turngym_client, name) for name in turngym_client.__all__)
