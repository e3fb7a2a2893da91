"""Makes the training scripts importable: they are part of the repository, not of the wheel."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
