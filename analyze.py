"""
From checkpoints to statistics, tables, figures and a page for the browser.

    python analyze.py out/demo                          # reads models and logs, writes results/demo/
    python analyze.py --results=results.csv --out=DIR   # tables and figures of any such csv, without its runs
    python analyze.py --hf MODEL                        # the same quantities of a model that others trained

analysis/: models to statistics (measure.py), runs to csv (runs.py), from these alone tables and figures.
"""
import argparse
import base64
import os
from pathlib import Path

from analysis import plots, runs, tables
from train import check, whole

STYLE = '''<!doctype html><meta charset="utf-8"><style>
  body { margin: 1rem auto; max-width: 68rem; font-family: sans-serif; } img { max-width: 100%; }
  div { max-height: 32rem; overflow: auto; } td, th { padding: .2rem .5rem; text-align: right; }
</style>'''

parser = argparse.ArgumentParser(usage='%(prog)s [RUNS ...] [--flag=value ...]', description=__doc__,
                                 allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
path = os.path.expanduser  # bash does not expand the ~ in --out=~/results
add = parser.add_argument
add('runs', nargs='*', type=path, help='run folders, or folders of them: out/demo')
add('--results', type=path, metavar='FILE.csv', help=f'a csv of runs instead; it needs the columns '
    f'{", ".join(runs.REQUIRED)}; see analysis/runs.py for what else it may have')
add('--out', type=path, help='folder to write to (default: results/NAME OF THE INPUT)')
add('--hf', nargs='+', metavar='MODEL', help="others' models: folders, NAME or NAME@REVISION")
add('--text', type=path, help='with --hf: like --files of prepare_fineweb.py, or stdlib')
add('--positions', type=whole, default=16384, help='with --hf: tokens of --text (16384); 0: E alone')


def markdown(table):
    align = ['left'] + ['right'] * (table['rows'].shape[1] - 1)
    grid = table['rows'].to_markdown(index=False, disable_numparse=True, colalign=align)
    return f'### {table["title"]}\n\n{grid}\n\n{table["caption"]}\n'


def write_page(out, left_out, items):
    """Writes report.html, which needs no other file; `left_out` are lines about runs that are not in it."""
    page = f'{STYLE}<h1>{out.resolve().name}</h1>\n<p>{"<br>".join(left_out)}</p>\n'
    for item in items:
        page += f'<h2>{item["title"]}</h2>\n<p>{item["caption"]}</p>\n'
        if 'rows' in item:
            page += f'<div>{item["rows"].to_html(index=False, escape=False, border=0)}</div>\n'
        else:
            image = base64.b64encode(Path(item['file']).read_bytes()).decode()
            page += f'<img src="data:image/png;base64,{image}">\n'
    (out / 'report.html').write_text(page, encoding='utf-8')


def of_runs(args, out):
    """Writes what there is of runs -> lines that say which are left out, and the items of the report."""
    left_out = runs.collect(args.runs, out) if args.runs else []  # run folders -> csv files
    all_runs, curves, distributions = runs.read(args.results or out / 'results.csv')
    of_seeds = tables.lrs_of_seeds(all_runs)
    lrs = tables.lrs_rows(of_seeds)
    all_tables = tables.make(all_runs, lrs)
    runs.write_csv(out / 'lrs.csv', lrs.drop(columns='plain_name'))
    (out / 'tables.md').write_text('\n'.join(map(markdown, all_tables)), encoding='utf-8')
    return left_out, plots.draw_all(all_runs, of_seeds, curves, distributions, out) + all_tables


def main(argv=None):
    args = parser.parse_args(argv)
    check(sum(map(bool, (args.runs, args.results, args.hf))) == 1, 'give run folders, or --results or --hf')
    source = Path(args.results or (args.runs or args.hf)[0]).resolve()
    source = source.parent if source.name == 'results.csv' else source
    out = Path(args.out or Path('results', source.name.removesuffix('.csv')))
    if args.hf:
        from analysis import hf  # it alone needs transformers
        left_out, items = [], hf.of_models(args, out)
    else:
        left_out, items = of_runs(args, out)
    write_page(out, left_out, items)
    for item in items:
        if 'rows' in item and item['title'] != 'All runs':
            rows = item['rows'].replace({'</?[bu]>': '', '<sub>': '(', '</sub>': ')'}, regex=True)
            print('', item['title'], rows.to_string(index=False), sep='\n')
    print('', *left_out, f'wrote {out}; open {out / "report.html"} in a browser', sep='\n')


if __name__ == '__main__':
    main()
