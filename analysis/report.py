"""The tables as Markdown, and report.html: tables and figures on one page that needs no other file."""
import base64
import re
from pathlib import Path

from oec.common import write_atomic

PAGE = """<!doctype html>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
  body {{ margin: 0 auto; padding: 1rem; max-width: 68rem; font: 16px/1.5 system-ui, sans-serif; }}
  h2 {{ margin-top: 2.5rem; }}
  img {{ max-width: 100%; }}
  div {{ max-height: 32rem; overflow: auto; }}
  table {{ border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }}
  th, td {{ padding: .2rem .5rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }}
  th {{ cursor: pointer; position: sticky; top: 0; background: #fff; }}
  th:first-child, td:first-child {{ text-align: left; }}
  sub {{ color: #777; vertical-align: baseline; }}
</style>
<h1>{title}</h1>
<p>{intro}</p>
<p>{links}</p>
{body}
<script>  // a click on a heading sorts its table, a second one the other way
  document.querySelectorAll('th').forEach(th => th.onclick = () => {{
    const body = th.closest('table').tBodies[0], i = th.cellIndex, text = tr => tr.cells[i].textContent;
    const sign = th.dataset.sign = th.dataset.sign === '1' ? -1 : 1;
    const compare = (a, b) => text(a) - text(b) || text(a).localeCompare(text(b));
    body.append(...[...body.rows].sort((a, b) => sign * compare(a, b)));
  }});
</script>
"""


def markdown(table):
    rows = table['rows']
    align = ['left'] + ['right'] * (rows.shape[1] - 1)
    grid = rows.to_markdown(index=False, disable_numparse=True, colalign=align)
    where = f' ({table["where"]})' if table['where'] else ''
    return f'### {table["title"]}\n\n{grid}\n\n{table["says"]}{where}\n'


def plain(text):
    """Markdown for a terminal: without tags."""
    return re.sub('</?(b|u|sub)>', '', text)


def write(path, text):
    write_atomic(path, lambda file: file.write(text), mode='w')


def write_report(out, intro, items):
    """report.html of tables and of figures, which have a `file` instead of rows."""
    body = []
    for i, item in enumerate(items):
        body.append(f'<h2 id="{i}">{item["title"]}</h2>\n<p>{item["says"]} {item["where"]}</p>')
        if 'rows' in item:
            body.append('<div>' + item['rows'].to_html(index=False, escape=False, border=0) + '</div>')
        else:
            image = base64.b64encode(Path(item['file']).read_bytes()).decode()
            body.append(f'<img src="data:image/png;base64,{image}" alt="{item["title"]}">')
    links = '<br>\n'.join(f'<a href="#{i}">{item["title"]}</a>' for i, item in enumerate(items))
    title = f'{Path(out).resolve().name}: output embedding centering'
    write(Path(out, 'report.html'), PAGE.format(title=title, intro=intro, links=links, body='\n'.join(body)))
