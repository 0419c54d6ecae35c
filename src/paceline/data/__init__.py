"""Data sets: the real formats, and generated stand-ins of the same shape for where the files are absent.

The platform itself needs none of them: they serve the examples, the tests and the benchmarks. All import
torch; those that read image files need the extra `vision`, and say so when it is missing.

digits.py             scikit-learn's handwritten digits, the data set that is always there
mnist.py              MNIST's IDX files, gzipped or not; drawn digits
cifar10.py            CIFAR-10, binary and Python version; drawn shapes
plain_pickle.py       reads the pickles of CIFAR-10's Python version without unpickling
image_folder.py       photos in a folder for every class
kitti.py              KITTI's images and label files
text.py               text files as bytes; generated sentences
images.py             reads image files and finds broken ones
folders.py            finds a data set's files below a directory
drawing.py            shapes and smooth noise in an array, for what is drawn
street_scenes.py      drawn streets with pedestrians, for KITTI
fire_scenes.py        drawn landscapes with fire and smoke, for the photos
accuracy.py           how good a classifier is
average_precision.py  how good a detector is
pictures.py           pictures of what a trained model does
options.py            the options that all examples have
"""

__all__: list[str] = []
