"""Parsed HTML pages for tests."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Content of a page: its tags with their attributes, and its text."""

    def __init__(self, source: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, tag) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]
