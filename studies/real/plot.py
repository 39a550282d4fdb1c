"""Draw studies/real/real.svg: the loss of the right answers by the cartridge's length.

python -m studies.real.plot
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from cartridge_forge.plugins.watch.report.plots import Plot, hue, legend
from cartridge_forge.protocols.files import write_atomically
from studies import archive
from studies.tables.recorded import article_outcomes
from studies.tables.registered import ANSWERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = (32, 128, 512)
CURVES = ("first tokens", "attention matching", "on policy", "recitation first", "offline")
ENDS = {"none": "no document", "document": "whole document"}


def plot() -> str:
    """Return the SVG: means over articles and seeds of the kept runs."""
    outcomes = article_outcomes("real", "sweep") | article_outcomes("real", "starts")
    means = {arm: fmean(o.units(ANSWERS).values()) for arm, o in outcomes.items()}

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for end, name in ENDS.items():
            axes.axhline(means[end], linestyle=":", color="gray", linewidth=1)
            axes.annotate(name, (LENGTHS[-1], means[end]), ha="right", va="bottom", fontsize=8)
        for index, arm in enumerate(CURVES):
            losses = [means[f"{p}: {arm}"] for p in LENGTHS]
            axes.plot(LENGTHS, losses, "o-", color=hue(index), label=arm)
        axes.set(xscale="log", xlabel="tokens of the cartridge", ylabel="loss, nats a token")
        axes.set_xticks(LENGTHS, map(str, LENGTHS))
        axes.minorticks_off()
        legend(axes, ncols=2)

    return Plot("The loss of the right answers by the cartridge's length", "", draw).alone


if __name__ == "__main__":
    write_atomically(archive.HOME / "real" / "real.svg", plot())
