"""A report as one HTML file: no scripts, nothing loaded from elsewhere, readable on a phone."""

from __future__ import annotations

import base64
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from calm_scale.accounting.report.document import Document, Picture, text_of

TEMPLATES = Path(__file__).parent.parent / "templates"


def to_html(document: Document) -> str:
    """The page; every text is escaped, pictures are embedded."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(text_of=text_of, data_uri=data_uri)
    return environment.get_template("report.html.j2").render(document=document)


def data_uri(picture: Picture) -> str:
    """The picture as an image source: its identifiers stay its own, and it can be copied as an image."""
    return "data:image/svg+xml;base64," + base64.b64encode(picture.draw().encode()).decode()
