"""Everything that must outlive a process.

* **atomic.py** - `write_text_atomically`: a file that readers see whole or not at all.
* **names.py** - `check_name`: refuses file names that are no text.
* **plain_files.py** - `open_plain`, `read_bytes`: no links, pipes or devices, and no file without an end.
* **json_files.py** - `parse_json`, `read_object`: JSON of bounded size and depth.
* **typed_json.py** - `checked`: plain data against the types of a class.
* **checkpoint.py** - `CheckpointWriter`, `load`, `latest`, `prune`: a run's state as a directory of
  safetensors and JSON files under one manifest of hashes.
* **store.py** - `Store`: immutable blobs under keys; `LocalStore`: on this disk.
* **manifest.py** - `read_manifest`: what a checkpoint's manifest must hold.
* **requests.py** - `Requests`: how a command's request to a running run, and its answer, travel.
* **run_requests.py** - what they say: one class for each.
* **checkpoint_meta.py** - `check_meta`: what a run needs of a checkpoint to go on from it.

Importing this package does not import torch, so a command that only lists checkpoints starts fast.
"""

from paceline.storage import atomic, checkpoint

__all__ = ["atomic", "checkpoint"]
