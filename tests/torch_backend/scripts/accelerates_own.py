"""What `accelerate test` runs, from the installed package, byte for byte: loaders, samplers, gathering, training.

It expects that all ranks see one folder, which laptops do not have and those of a test do: it is named by an argument.
"""

import os
import runpy
import sys

from accelerate import Accelerator
from accelerate.test_utils.scripts import test_script

os.chdir(sys.argv[1])
assert Accelerator().num_processes == int(os.environ["WORLD_SIZE"]) > 1, "each laptop would train alone"
runpy.run_path(test_script.__file__, run_name="__main__")
print("as it should be", flush=True)
