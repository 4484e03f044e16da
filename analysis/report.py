"""
Tables as Markdown, and report.html: figures and tables on one page that needs no other file. Both are made of
items, dicts with a title, a caption, and rows or an image file. All is HTML.
"""
import base64
import html
import re
from pathlib import Path
from string import Template

from oec.common import write_atomic

PAGE = Template(Path(__file__).with_name('page.html').read_text(encoding='utf-8'))


def markdown(table):
    """A table as Markdown; what would be a sign of it is escaped."""
    def escape(text):
        return re.sub(r'([\\`*|~$\[\]]|\b_|_\b)', r'\\\1', text)
    rows = table['rows'].map(escape).rename(columns=escape)
    align = ['left'] + ['right'] * (rows.shape[1] - 1)
    grid = rows.to_markdown(index=False, disable_numparse=True, colalign=align)
    return f'### {escape(table["title"])}\n\n{grid}\n\n{table["caption"]}\n'


def for_terminal(rows):
    """The rows of a table as plain text, what is small in parentheses."""
    rows = rows.replace({'</?[bu]>': '', '<sub>': '(', '</sub>': ')'}, regex=True).map(html.unescape)
    return rows.rename(columns=html.unescape).to_string(index=False)


def write_text(path, text):
    write_atomic(path, lambda file: file.write(text.encode(errors='backslashreplace')))


def write_page(out, left_out, items):
    """Writes report.html; `left_out` are lines about runs that are not in it."""
    body = []
    for i, item in enumerate(items):
        body.append(f'<h2 id="{i}">{item["title"]}</h2>\n<p>{item["caption"]}</p>')
        if 'rows' in item:
            body.append('<div>' + item['rows'].to_html(index=False, escape=False, border=0) + '</div>')
        else:
            image = base64.b64encode(Path(item['file']).read_bytes()).decode()
            body.append(f'<img src="data:image/png;base64,{image}" alt="{item["title"]}">')
    page = PAGE.substitute(
        title=f'{html.escape(Path(out).resolve().name)}: output embedding centering', body='\n'.join(body),
        left_out='<br>\n'.join(map(html.escape, left_out)),
        links='<br>\n'.join(f'<a href="#{i}">{item["title"]}</a>' for i, item in enumerate(items)))
    write_text(Path(out, 'report.html'), page)
