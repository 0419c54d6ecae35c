"""Scripts of other libraries in a Paceline run, with one changed line.

* `lightning_strategy.py` PacelineStrategy for PyTorch Lightning: `Trainer(strategy=PacelineStrategy())`.
* `hf_trainer.py`         PacelineTrainer for Hugging Face's transformers, in the place of its Trainer.
* `epoch_loader.py`       EpochLoader: the loader that these libraries read; StopVote: their early stop.

Nothing here imports the libraries before a class is asked for: they are extras
(`pip install 'paceline[lightning]'`, `pip install 'paceline[transformers]'`).
"""

from typing import Any

PacelineStrategy: type[Any]
PacelineTrainer: type[Any]

__all__ = ["PacelineStrategy", "PacelineTrainer"]


def __getattr__(name: str) -> object:
    if name == "PacelineStrategy":
        from paceline.integrations.lightning_strategy import strategy_class

        return strategy_class()
    if name == "PacelineTrainer":
        from paceline.integrations.hf_trainer import trainer_class

        return trainer_class()
    raise AttributeError(f"module 'paceline.integrations' has no attribute {name!r}")
