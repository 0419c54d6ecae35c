"""Faster R-CNN finds pedestrians in KITTI's street scenes, the application of paper 0.

python examples/pedestrians.py --data ~/kitti --height 375       # alone; without --data on drawn scenes
paceline run --workers 2 --mode asp examples/pedestrians.py
"""

import argparse
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.data.average_precision import average_precision
from paceline.data.kitti import kitti
from paceline.data.options import (
    SYNTHETIC,
    data_options,
    ends_with_message,
    left_out,
    marks_of,
    source_of,
    vision,
)
from paceline.data.pictures import save_boxes
from paceline.data.street_scenes import StreetScenes


def make_detector(height: int) -> nn.Module:
    """Faster R-CNN on a ResNet-18 with a feature pyramid: 19.5 million parameters."""
    detection = vision("torchvision.models.detection")
    body = detection.backbone_utils.BackboneWithFPN(
        vision("torchvision.models").resnet18(),
        return_layers={f"layer{number}": str(number) for number in range(1, 5)},
        in_channels_list=[64, 128, 256, 512],
        out_channels=128,
    )
    sizes = [max(8, height // 24) * 2**level for level in range(5)]
    anchors = detection.anchor_utils.AnchorGenerator([(size,) for size in sizes], [(1.5, 2.5)] * 5)
    detector: nn.Module = detection.FasterRCNN(
        body,
        num_classes=2,
        min_size=height,
        max_size=4 * height,
        rpn_anchor_generator=anchors,
        rpn_pre_nms_top_n_train=400,
        rpn_post_nms_top_n_train=200,
        rpn_pre_nms_top_n_test=200,
        rpn_post_nms_top_n_test=50,
        box_batch_size_per_image=64,
        box_detections_per_img=20,
    )
    return detector


def in_lists(samples: list[Any]) -> list[list[Any]]:
    """A batch for a detector: a list of images, of any sizes, and a list of targets."""
    return [list(part) for part in zip(*samples, strict=True)]


@torch.no_grad()
def precision_of(detector: nn.Module, data: Dataset[Any]) -> float:
    """Average precision at an overlap of 0.5."""
    detector.eval()
    found: list[tuple[Tensor, Tensor]] = []
    true: list[tuple[Tensor, Tensor]] = []
    for images, targets in DataLoader(data, batch_size=8, collate_fn=in_lists):
        found += [(output["boxes"], output["scores"]) for output in detector(images)]
        true += [(target["boxes"], target["ignored"]) for target in targets]
    detector.train()
    return average_precision(found, true)


@torch.no_grad()
def draw(file: str, detector: nn.Module, data: Dataset[Any]) -> None:
    """Four scenes, with the true boxes and those that the detector is sure of."""
    detector.eval()
    images, targets = in_lists([data[number] for number in range(4)])
    outputs = detector(images)
    save_boxes(
        file,
        images,
        [output["boxes"][output["scores"] > 0.5] for output in outputs],
        [target["boxes"] for target in targets],
    )


@ends_with_message
def main() -> None:
    """Train and test."""
    parser = argparse.ArgumentParser(description="Faster R-CNN on KITTI's pedestrians")
    data_options(parser, epochs=1, batch_size=8, data="KITTI's object data set", skip_broken=True)
    parser.add_argument("--height", type=int, default=96, help="images are scaled to it; KITTI's have 375")
    parser.add_argument("--lr", type=float, default=0.001)
    args = parser.parse_args()
    train: Dataset[Any]
    test: Dataset[Any]
    skipped: list[str] = []
    if args.data == SYNTHETIC:
        sizes = {"height": args.height, "width": 2 * args.height}
        train, test = StreetScenes(2000, **sizes), StreetScenes(100, **sizes, seed=1)
    else:
        train, test = kitti(args.data, skip_broken=args.skip_broken)
        skipped = train.skipped

    torch.manual_seed(0)
    model = make_detector(args.height)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True, collate_fn=in_lists)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    steps = args.steps or args.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps)

    for _ in paceline.epochs(1 if args.steps else args.epochs):
        for images, targets in islice(loader, args.steps):
            losses: dict[str, Tensor] = model(images, targets)
            loss = torch.stack(list(losses.values())).sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            paceline.log(loss=loss.item())
    if paceline.is_main():
        with paceline.run_parameters():
            score = precision_of(model, test)
            if args.picture:
                draw(args.picture, model, test)
        paceline.log(average_precision=score, **marks_of(args.data))
        source = f"{source_of(args.data)}{left_out(skipped)}"
        print(f"pedestrians, {source}: average precision at IoU 0.5 {score:.4f}")


if __name__ == "__main__":
    main()
