"""configs.reference: the page is what the schema says, and the schema says everything."""

from __future__ import annotations

import re

import pytest

from configs import schema
from configs.reference import HEADINGS, PAGE, page, unit

each_section = pytest.mark.parametrize("section", HEADINGS, ids=lambda section: section.__name__)


def test_the_committed_page_is_what_the_schema_prints() -> None:
    assert PAGE.read_text() == page(), "run python -m configs.reference --write"


def test_every_section_of_the_schema_has_a_heading() -> None:
    assert set(HEADINGS) == set(schema.Section.__subclasses__())


@each_section
def test_every_field_has_a_description(section: type[schema.Section]) -> None:
    assert [name for name, field in section.model_fields.items() if not (field.description or "").strip()] == []


@each_section
def test_no_field_says_its_default_twice(section: type[schema.Section]) -> None:
    assert [name for name, field in section.model_fields.items() if "default:" in (field.description or "")] == []


@each_section
def test_no_field_says_its_unit_twice(section: type[schema.Section]) -> None:
    twice = re.compile(r", in (?:bytes|percent|seconds|tokens)\b")
    assert [name for name, field in section.model_fields.items() if twice.search(field.description or "")] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("drain_s", "s"),
        ("link_bytes_per_s", "bytes/s"),
        ("prefill_tokens_per_s", "tokens/s"),
        ("block_size", "tokens"),
        ("policy", ""),
        ("near_share", "share"),
    ],
)
def test_the_unit_is_in_the_name(name: str, expected: str) -> None:
    assert unit(name) == expected
