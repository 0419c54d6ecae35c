"""Differential tests: random training scripts, run by plain PyTorch and by Paceline, must agree.

* `description.py` Case: the choices that make one script, and the hypothesis strategy that draws them.
* `source.py`      writes a case as a script: a file that anybody can run.
* `reference.py`   the part of every script that says what plain PyTorch does.
* `databases.py`   scripts with the modules and optimizer settings of torch's own databases.
* `records.py`     what a script records, and how two records differ.
* `harness.py`     runs a script in every way and compares; writes failing scripts to a directory.
* `test_scripts.py`, `test_module_db.py`, `test_optim_db.py`: the tests.
"""
