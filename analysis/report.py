"""Tables as text, Markdown and HTML, and report.html: all on one page that needs no other file."""
import base64
import os

import jinja2

from common import write_atomic

TAGS = {  # bold; underlined; small and grey
    'text': {'[b]': '**', '[/b]': '**', '[u]': '_', '[/u]': '_', '[s]': '(', '[/s]': ')'},
    'md': {'[b]': '**', '[/b]': '**', '[u]': '<u>', '[/u]': '</u>', '[s]': '<sub>', '[/s]': '</sub>',
           '|': r'\|'},
    'html': {'[b]': '<b>', '[/b]': '</b>', '[u]': '<u>', '[/u]': '</u>', '[s]': '<small>',
             '[/s]': '</small>'}}


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


def write_report(out, runs, shown, all_runs, settings, notes, sentence):
    """report.html in the folder `out`: a sentence, figures and tables, the table of all runs, the rest."""
    def image(file):
        with open(os.path.join(out, 'figures', f'{file}.png'), 'rb') as png:
            return base64.b64encode(png.read()).decode()
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, 'report_template.html'), encoding='utf-8') as file:
        template = jinja2.Template(file.read(), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    write(os.path.join(out, 'report.html'), template.render(
        title=os.path.basename(os.path.abspath(out)), runs=runs, shown=shown, all_runs=all_runs,
        settings=settings, notes=notes, sentence=sentence, image=image, html=html))
