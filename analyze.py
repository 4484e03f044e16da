"""
From checkpoints to statistics, tables, figures and a page for the browser.

    python analyze.py out/demo                          # reads models and logs, writes results/demo/
    python analyze.py --results=results.csv --out=DIR   # tables and figures of any such csv, without its runs
    python analyze.py --hf MODEL                        # the same quantities of a model that others trained

Models become statistics (analysis/measure.py), runs become csv files (runs.py), and from these files alone
come the tables (tables.py) and the figures (plots.py).
"""
import argparse
import base64
import os
from pathlib import Path

from analysis import plots, runs, tables
from train import check, whole

PAGE = '''<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>
  body {{ margin: 1rem auto; max-width: 68rem; font-family: sans-serif; }} img {{ max-width: 100%; }}
  div {{ max-height: 32rem; overflow: auto; }} td, th {{ padding: .2rem .5rem; text-align: right; }}
</style><h1>{title}</h1><p>{left_out}</p>{body}'''


def parser():
    p = argparse.ArgumentParser(usage='%(prog)s [RUNS ...] [--flag=value ...]', description=__doc__,
                                allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    path = os.path.expanduser  # bash does not expand the ~ in --out=~/results
    p.add_argument('runs', nargs='*', type=path, help='run folders, or folders of them: out/demo')
    p.add_argument('--results', type=path, metavar='FILE.csv', help='a csv of runs instead; it needs '
                   f'{", ".join(runs.REQUIRED)}; see analysis/runs.py for what else it may have')
    p.add_argument('--out', type=path, help='folder to write to (default: results/NAME OF THE INPUT)')
    p.add_argument('--hf', nargs='+', metavar='MODEL', help="others' models: folders, NAME or NAME@REVISION")
    p.add_argument('--text', type=path, help='with --hf: like --files of prepare_fineweb.py, or stdlib')
    p.add_argument('--positions', type=whole, default=16384,
                   help='with --hf: tokens of --text (default 16384); 0: the output embeddings alone')
    p.add_argument('--center_to', type=path, help='with --hf: a new folder for a centered model')
    return p


def markdown(table):
    align = ['left'] + ['right'] * (table['rows'].shape[1] - 1)
    grid = table['rows'].to_markdown(index=False, disable_numparse=True, colalign=align)
    return f'### {table["title"]}\n\n{grid}\n\n{table["caption"]}\n'


def write_page(out, left_out, items):
    """Writes report.html, which needs no other file; `left_out` are lines about runs that are not in it."""
    body = ''
    for item in items:
        body += f'<h2>{item["title"]}</h2>\n<p>{item["caption"]}</p>\n'
        if 'rows' in item:
            body += f'<div>{item["rows"].to_html(index=False, escape=False, border=0)}</div>\n'
        else:
            image = base64.b64encode(Path(item['file']).read_bytes()).decode()
            body += f'<img src="data:image/png;base64,{image}">\n'
    page = PAGE.format(title=out.resolve().name, left_out='<br>\n'.join(left_out), body=body)
    (out / 'report.html').write_text(page, encoding='utf-8')


def of_runs(args, out):
    """Writes what there is of runs -> lines that say which are left out, and the items of the report."""
    left_out = runs.collect(args.runs, out) if args.runs else []  # run folders -> csv files
    all_runs, curves, distributions = runs.read(args.results or out / 'results.csv')
    unusual = all_runs.variant[~all_runs.in_paper_setting].unique()
    if len(unusual):
        left_out.append("not in the paper's setting, so only among the training curves and in the table "
                        f'of all runs: {"; ".join(unusual)}')
    of_seeds = tables.lrs_of_seeds(all_runs)
    lrs = tables.lrs_rows(of_seeds)
    all_tables = tables.make(all_runs, lrs)
    runs.write_csv(out / 'lrs.csv', lrs.drop(columns='plain_name'))
    (out / 'tables.md').write_text('\n'.join(map(markdown, all_tables)), encoding='utf-8')
    return left_out, plots.draw_all(all_runs, of_seeds, curves, distributions, out) + all_tables


def main(argv=None):
    args = parser().parse_args(argv)
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
