"""
The training text of these runs: x/, the unpacked Debian packages of README.md -> docs.jsonl, one document
a line, shuffled.
"""
import gzip
import html
import json
import os
import random
import re
from collections import Counter
from glob import glob

CHUNK = 6000  # characters of a text that has no documents of its own


def read(path):
    """The text of a file, gzipped or not."""
    opened = gzip.open if path.endswith(('.gz', '.dz')) else open
    with opened(path, 'rt', encoding='utf-8', errors='replace') as file:
        return file.read()


def chunks(text):
    return [text[i:i + CHUNK] for i in range(0, len(text), CHUNK)]


def plain(page):
    """HTML -> its text, a line for each block."""
    page = re.sub(r'(?is)<(script|style|head|nav).*?</\1>', ' ', page)
    page = re.sub(r'(?i)<(br|p|div|li|h\d|tr|pre)[^>]*>', '\n', page)
    return re.sub(r'\n\s*\n\s*', '\n\n', html.unescape(re.sub(r'<[^>]+>', '', page)))


def wordnet(path):
    """WordNet's synsets as 'word word: definition', 60 a document."""
    lines = []
    for line in read(path).splitlines():
        if '|' in line and not line.startswith('  '):  # two spaces: the licence
            fields, definition = line.split('|', 1)
            fields = fields.split()  # the number of words in hexadecimal, then a word and its sense by turns
            words = ' '.join(word.replace('_', ' ') for word in fields[4:4 + 2 * int(fields[3], 16):2])
            lines.append(re.sub(r'\s[0-9a-f]{1,2}\b', '', words) + ': ' + definition.strip())
    return ['\n'.join(lines[i:i + 60]) for i in range(0, len(lines), 60)]


def documents():
    """(source, text) of each document."""
    for text in chunks(read(glob('x/dict-gcide/usr/share/dictd/*.dz')[0])):
        yield 'gcide', text
    for path in sorted(glob('x/wordnet-base/usr/share/wordnet/data.*')):
        for text in wordnet(path):
            yield 'wordnet', text
    folder = 'x/linux-doc-6.1/usr/share/doc/linux-doc-6.1/Documentation'
    for path in sorted(glob(f'{folder}/**/*', recursive=True)):
        wanted = os.path.isfile(path) and re.search(r'\.(rst|txt|yaml)(\.gz)?$', path)
        if wanted and '/translations/' not in path:
            yield 'linux', read(path)
    for path in sorted(glob('x/debian-handbook/usr/share/doc/debian-handbook/html/*/*.html')):
        if re.search('/(en-US|de-DE|es-ES|fr-FR|it-IT|pt-BR|nl-NL|pl-PL|sv-SE)/', path):
            yield 'handbook', plain(read(path))
    for name, package in (('reference', 'debian-reference-en'), ('postgres', 'postgresql-doc-15')):
        for path in sorted(glob(f'x/{package}/**/*.html', recursive=True)):
            yield name, plain(read(path))
    # compressed, which nobody saw before the runs: noise
    for path in sorted(glob('x/bible-kjv-text/**/*', recursive=True)):
        if os.path.isfile(path) and os.path.getsize(path) > 500_000 and not path.endswith('.gz'):
            for text in chunks(read(path)):
                yield 'kjv', text


if __name__ == '__main__':
    texts, characters = [], Counter()
    for source, text in documents():
        text = text.strip()
        if len(text) >= 200:
            texts.append(json.dumps({'text': text}) + '\n')
            characters[source] += len(text)
    random.Random(0).shuffle(texts)
    with open('docs.jsonl', 'w') as file:
        file.writelines(texts)
    print(f'{len(texts):,} documents; millions of characters:')
    print(', '.join(f'{source} {n / 1e6:.1f}' for source, n in characters.items()))
