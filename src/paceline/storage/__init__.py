"""Everything that must outlive a process.

* **atomic.py** - `write_text_atomically`: a file that readers see whole or not at all.
* **names.py** - `check_name`: refuses file names that are no text.
* **checkpoint.py** - `CheckpointWriter`, `load`, `latest`, `prune`: a run's state as a directory of
  safetensors and JSON files under one manifest of hashes.

Importing this package does not import torch, so a command that only lists checkpoints starts fast.
"""

from paceline.storage import atomic, checkpoint

__all__ = ["atomic", "checkpoint"]
