"""Tables as text, Markdown and HTML, and report.html: all on one page that needs no other file."""
import base64
from pathlib import Path

import jinja2

from oec.common import write_atomic

TAGS = {  # bold; underlined; small and grey
    'text': {'[b]': '**', '[/b]': '**', '[u]': '_', '[/u]': '_', '[s]': '(', '[/s]': ')'},
    'md': {'[b]': '**', '[/b]': '**', '[u]': '<u>', '[/u]': '</u>', '[s]': '<sub>', '[/s]': '</sub>',
           '|': r'\|'},
    'html': {'[b]': '<b>', '[/b]': '</b>', '[u]': '<u>', '[/u]': '</u>', '[s]': '<i>', '[/s]': '</i>'}}


def tagged(words, form):
    for tag, code in TAGS[form].items():
        words = words.replace(tag, code)
    return words


def markdown(table, form='md'):
    """The table with its title and what it shows, as Markdown or as text for a terminal."""
    rows, where = table['rows'].map(lambda words: tagged(words, form)), table['where']
    align = ['left'] + ['right'] * (rows.shape[1] - 1)
    grid = rows.to_markdown(index=False, disable_numparse=True, colalign=align)
    return f'### {table["title"]}\n\n{grid}\n\n{table["says"]}' + (f' ({where})\n' if where else '\n')


def html(table):
    return tagged(table['rows'].to_html(index=False, border=0), 'html')


def write(path, text):
    write_atomic(path, lambda file: file.write(text), mode='w')


def write_report(out, shown, notes, runs=None, settings=None):
    """report.html in the folder `out`: the figures and tables of `shown`, and what is left out."""
    def image(file):
        return base64.b64encode(Path(out, 'figures', f'{file}.png').read_bytes()).decode()
    text = Path(__file__).with_name('report_template.html').read_text(encoding='utf-8')
    template = jinja2.Template(text, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    write(Path(out, 'report.html'), template.render(
        title=Path(out).resolve().name, runs=runs, shown=shown, settings=settings, notes=notes,
        image=image, html=html))
