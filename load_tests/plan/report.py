"""A plan as a table, as a JSON object and as a picture."""

from __future__ import annotations

from dataclasses import asdict
from html import escape
from typing import Any

from load_tests.plan.judge import Verdict
from load_tests.plan.planned import Planned

WIDTH, HEIGHT, MARGIN = 760, 420, 60
COLOURS = ("#3f51b5", "#e64a19", "#00897b", "#8e24aa", "#f9a825", "#5d4037", "#1e88e5", "#7cb342")


def table(planned: Planned) -> str:
    """The plan, the fleets beside it, and the cheapest found of every kind."""
    best, target = planned.search.best, planned.demand.target
    if best is None:
        return f"No fleet that was tried has {target:.2%} of the requests within the objectives."
    rows = [("fleet", "an hour", "in time", "")]
    if planned.confirmed is not None:
        rows.append(_row(planned.confirmed, "the plan"))
    rows += [_row(each, "one fewer") for each in planned.fewer]
    for room in planned.rooms:
        found = planned.search.best_of(room.kind)
        if found is None:
            rows.append((room.kind.name, "", "", "none that costs less"))
        elif found != best:
            rows.append((found.name, f"{found.cost:.2f}", "", "its kind's cheapest found"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join((row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]), row[3])) for row in rows
    ]
    cut = ["The time was over before the search was: a cheaper fleet may exist (--minutes)."] if planned.is_cut else []
    return "\n".join([line.rstrip() for line in lines] + cut)


def _row(verdict: Verdict, about: str) -> tuple[str, str, str, str]:
    word = "" if verdict.meets else ", misses"
    return verdict.fleet.name, f"{verdict.fleet.cost:.2f}", f"{verdict.attained:.2%}", f"{about}{word}"


def found(planned: Planned) -> dict[str, Any]:
    """The plan as JSON; `plan` is null where no fleet meets the objectives."""
    best, demand = planned.search.best, planned.demand
    length_s = demand.trace.requests[-1].at_s
    kinds = {room.kind.name: planned.search.best_of(room.kind) for room in planned.rooms}
    return {
        "trace": demand.trace.name,
        "requests": len(demand.trace.requests),
        "rate": round((len(demand.trace.requests) - 1) / length_s, 3),
        "counted": demand.counted,
        "target": demand.target,
        "objectives": [asdict(each) for each in demand.classes],
        "plan": None if best is None or planned.confirmed is None else _json(planned.confirmed),
        "fewer": [_json(each) for each in planned.fewer],
        "kinds": {
            name: None if fleet is None else {"fleet": fleet.name, "cost": fleet.cost} for name, fleet in kinds.items()
        },
        "is_cut": planned.is_cut,
        "simulations": len(planned.verdicts),
    }


def _json(verdict: Verdict) -> dict[str, Any]:
    fleet = verdict.fleet
    parts = zip(fleet.kind.roles, fleet.kind.devices, fleet.counts, strict=True)
    return {
        "pools": [{"role": role.value, "device": device.name, "replicas": number} for role, device, number in parts],
        "cost_per_hour": round(fleet.cost, 6),
        "seed": verdict.seed,
        "meets": verdict.meets,
        "attained": round(verdict.attained, 5),
        **{name: verdict.figures.get(name) for name in ("ttft_p99_s", "tpot_p99_s", "hit_rate", "refused")},
    }


def picture(planned: Planned) -> str:
    """What was simulated, as SVG: replicas of the first pool of each kind across, cost upwards.

    A filled circle meets the objectives, an open one does not. The ring is the plan.
    """
    fleets = {verdict.fleet: verdict.meets for verdict in planned.verdicts}
    right = max(sum(fleet.counts) for fleet in fleets) + 1
    top = 1.1 * max(fleet.cost for fleet in fleets)

    def at(count: float, cost: float) -> tuple[float, float]:
        return MARGIN + count / right * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - cost / top * (HEIGHT - 2 * MARGIN)

    marks = [_axes(right, top)]
    for number, room in enumerate(planned.rooms):
        colour = COLOURS[number % len(COLOURS)]
        marks.append(
            f'<text x="{MARGIN + 10}" y="{MARGIN / 2 + 15 * number}" fill="{colour}">{escape(room.kind.name)}</text>'
        )
        for fleet, meets in fleets.items():
            if fleet.kind == room.kind:
                x, y = at(fleet.counts[0], fleet.cost)
                title = f"<title>{escape(fleet.name)}: {'meets' if meets else 'misses'}</title>"
                fill = colour if meets else "none"
                marks.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" stroke="{colour}" fill="{fill}">{title}</circle>'
                )
                if fleet == planned.search.best:
                    marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" stroke="black" fill="none"/>')
    body = "\n".join(marks)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'


def _axes(right: float, top: float) -> str:
    floor, end = HEIGHT - MARGIN, WIDTH - MARGIN
    return "\n".join(
        (
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<path d="M{MARGIN} {MARGIN}V{floor}H{end}" stroke="black" fill="none"/>',
            f'<text x="{end}" y="{floor + 30}" text-anchor="end">replicas of the first pool, up to {right:g}</text>',
            f'<text x="{MARGIN}" y="{MARGIN - 8}" text-anchor="end">{top:.0f}</text>',
            f'<text x="15" y="{HEIGHT / 2}" transform="rotate(-90 15 {HEIGHT / 2})">cost an hour</text>',
        )
    )
