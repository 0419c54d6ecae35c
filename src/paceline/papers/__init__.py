"""`paceline bench`: repeats the experiments of the papers that Paceline is built from.

Every figure of the paper stands beside ours, with the ratio and the reason for the difference.

* `bench.py`         repeat: all experiments of a paper, and the files with their results.
* `published.py`     the papers' own figures.
* `scales.py`        how much is repeated: small, full.
* `results.py`       Results and what they are made of. `results_page.py`: the page and the JSON file.

Paper 1: `speedups.py`, its tables 1 to 3, with the script `photo_training.py` and `photos.py`.

Paper 4, with the script `image_training.py`:

* `resource_profile.py`     table II.
* `accuracy_by_workers.py`  figures 7 and 8, emulated in virtual time.
* `server_counts.py`        figure 9.
* `batch_sizes.py`          figure 10.
* `idleness.py`             figure 11, with emulated computing and latency.

`trials.py` runs scripts and reads what the runs recorded, `step_times.py` what the scripts noted.
`scoring.py`: accuracy after batch normalisation was calibrated.
`networks.py`: AlexNet, VGG16, ResNet-18, Inception-v1.

The only package of ours that may use `paceline.testing`: it emulates what a machine does not have.
"""

__all__: list[str] = []
