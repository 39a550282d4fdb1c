"""Draw the plot of docs/studies/real.md: the loss of the right answers over a cartridge's length.

python -m benchmarks.results.real_plot
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.results.real_study import outcomes
from forge_run.report.plots import Plot, hue, legend
from protocols.files import REPOSITORY, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = REPOSITORY / "docs" / "studies" / "real.svg"
LENGTHS = (32, 128, 512)
CURVES = ("first tokens", "on policy", "recitation first", "offline")
ENDS = {"none": "no document", "document": "whole document"}


def plot(study: str) -> str:
    """Return an SVG of the kept runs of configs/STUDY.yaml: means over articles and seeds."""
    found = {arm: fmean(map(fmean, own.answers.values())) for arm, own in outcomes(study).items()}

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for end, shown in ENDS.items():
            axes.axhline(found[end], linestyle=":", color="gray", linewidth=1)
            axes.annotate(shown, (LENGTHS[-1], found[end]), ha="right", va="bottom", fontsize=8)
        for index, arm in enumerate(CURVES):
            losses = [found[f"{p}: {arm}"] for p in LENGTHS]
            axes.plot(LENGTHS, losses, "o-", color=hue(index), label=arm)
        axes.set(xscale="log", xlabel="tokens of the cartridge", ylabel="loss, nats a token")
        axes.set_xticks(LENGTHS, map(str, LENGTHS))
        axes.minorticks_off()
        legend(axes, ncols=2)

    return Plot("The loss of the right answers by the cartridge's length", "", draw).alone


if __name__ == "__main__":
    write_atomically(FILE, plot("sweep_real"))
