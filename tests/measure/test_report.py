"""A report is one page that fetches nothing, and escapes all its content."""

import html.parser
import math
import re

from rlzoo.measure.figures import Series, plot_by_length
from rlzoo.measure.report import ReportSection, Table, number, render

EVIL = "<script>alert(1)</script>"


def page():
    figure = plot_by_length({EVIL: Series((1, 2), (0.1, 0.2))}, title=EVIL)
    table = Table(
        EVIL, [EVIL, "value"], [[EVIL, 0.03214], ["none", None], ["not", math.nan], ["many", 12345], ["big", 123456.0]]
    )
    return render(EVIL, {EVIL: EVIL}, [ReportSection(EVIL, [f"{EVIL} and `code {EVIL}`"], [figure, figure], [table])])


def test_given_text_is_escaped():
    assert "<script" not in page()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page()


def test_the_page_loads_nothing_external():
    outside = [address for address in re.findall(r'(?:src|href)="([^"]*)"', page()) if not address.startswith("#")]
    assert outside == []
    assert "@import" not in page()


def test_numbers_have_three_decimals_or_digits_and_unknown_values_a_dash():
    cells = re.findall(r'<td class="number">(.*?)</td>', page())
    assert cells == ["0.032", "–", "–", "12,345", "123,456"]


def test_backticks_make_code():
    assert "<code>code &lt;script&gt;" in page()


def test_tags_are_closed():
    class Balance(html.parser.HTMLParser):
        def __init__(self):
            super().__init__()
            self.open = []

        def handle_starttag(self, tag, attrs):
            if tag != "meta":
                self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    balance = Balance()
    balance.feed(page())
    assert balance.open == []


def test_numbers_never_round_into_an_exponent():
    # 999.6 with three digits would be 1.00e3: it is written as a whole number, like 1000
    assert [number(value) for value in (999.4, 999.6, -999.6, 1000.0)] == ["999", "1,000", "-1,000", "1,000"]


def test_headings_are_aligned_with_their_numbers():
    assert '<th class="number">value</th>' in page()
