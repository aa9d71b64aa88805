"""The report of a run as one HTML file, pictures included."""

from __future__ import annotations

import base64
import html
from string import Template
from typing import Any

from speedtransfer.benchmark import report
from speedtransfer.benchmark.suites import SUITES

_PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>speedtransfer bench: $title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2430; background: #fff; max-width: 72rem;
       margin: 2rem auto; padding: 0 1rem }
h1, h2 { line-height: 1.2 }
h2 { margin-top: 3rem; border-bottom: 2px solid #0072b2; padding-bottom: .3rem }
img { max-width: 100%; height: auto; margin: 1rem 0 }
.quiet { color: #6b7280; font-size: .9em }
.note { border-left: 4px solid #e69f00; background: #fdf7ea; padding: .6rem 1rem; max-width: 60rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .9em; margin: .8rem 0 1.6rem }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
th { border-bottom: 1px solid #1f2430; vertical-align: bottom }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 12rem }
tbody tr:nth-child(even) { background: #f5f6f8 }
tr.ours td:first-child { font-weight: 600; color: #0072b2 }
summary { cursor: pointer; margin: .5rem 0 }
@media (max-width: 46rem) {
  .wide img { max-width: none; width: 44rem }
  th, td { padding: .25rem .4rem }
  th:first-child, td:first-child { min-width: 7.5rem; position: sticky; left: 0; background: #fff }
  tbody tr:nth-child(even) td:first-child { background: #f5f6f8 }
}
</style>
</head>
<body>
<h1>speedtransfer bench</h1>
<p class="quiet">1 GB/s is 1e9 bytes of rows a second, each byte counted once. Every method is checked before it is timed; they
are timed in turns, and medians are shown. &ldquo;Of roof&rdquo; is the share of a plain copy of the same bytes in one piece,
measured in the same run.</p>
$suites
</body>
</html>
""")


def page(results: list[dict[str, Any]], pictures: dict[str, bytes]) -> str:
    """Return the report on recorded suites, with PNG `pictures` by suite."""
    title = ", ".join(result["suite"] for result in results)
    return _PAGE.substitute(
        title=html.escape(title), suites="\n".join(_suite(result, pictures.get(result["suite"])) for result in results)
    )


def _suite(result: dict[str, Any], picture: bytes | None) -> str:
    suite, groups = SUITES[result["suite"]], report.groups_of(result)
    parts = [f"<h2>{html.escape(suite.title)}</h2>", f'<p class="quiet">{html.escape(report.provenance(result))}</p>']
    parts.append(_list(report.headlines(suite.name, groups)))
    if picture is not None:
        code = base64.b64encode(picture).decode("ascii")
        image = f'<img alt="{html.escape(suite.title)}" src="data:image/png;base64,{code}">'
        parts.append(f'<div class="wide">{image}</div>')
    if suite.note:
        parts.append(f'<p class="note">{html.escape(suite.note)}</p>')
    parts += [_table(table) for table in report.summary_tables(result)]
    details = "".join(_table(report.group_table(group)) for group in groups if group.ran)
    parts.append(f"<details><summary>All figures of {len(groups)} groups</summary>{details}</details>")
    left_out = report.missing(result)
    if left_out:
        parts.append(f"<details open><summary>Not run here, and why</summary>{_list(left_out)}</details>")
    parts.append(f"<details><summary>Machine and versions</summary>{_environment(result['environment'])}</details>")
    return "\n".join(filter(None, parts))


def _list(lines: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _table(table: report.TextTable) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in [table.title, *table.header[1:]])
    body = "".join(
        f"<tr{' class=' + chr(34) + 'ours' + chr(34) if row[0] in table.ours else ''}>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in table.rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _environment(facts: dict[str, Any]) -> str:
    flat = {key: value for key, value in facts.items() if key != "versions"} | facts["versions"]
    return _table(
        report.TextTable("", ["", ""], [[key, "" if value is None else str(value)] for key, value in flat.items()])
    )
