"""What a reader and a browser get from a page."""

from html.parser import HTMLParser

VOID = {"meta", "br", "img"}


class Page(HTMLParser):
    """Checks that tags nest; collects tags, links and text, and counts the tables that stand in no box of their own."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.text, self.loose_tables = [], [], [], "", 0
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        boxes = [("div", kind) for kind in ("scroll", "wrap", "dense", "densest")]
        self.loose_tables += tag == "table" and self.open[-1] not in boxes
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("class")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.text += data
