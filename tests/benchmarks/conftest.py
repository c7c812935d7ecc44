import sys
from pathlib import Path

# benchmarks/ is not part of the installed package. At the end of the path, so that the source tree does not
# hide the installed package
sys.path.append(str(Path(__file__).resolve().parents[2]))
