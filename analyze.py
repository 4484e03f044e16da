"""
From checkpoints to statistics, tables, figures and a page for the browser.

    python analyze.py out/demo                          # reads models and logs, writes results/demo/
    python analyze.py --results=results.csv --out=DIR   # tables and figures of any such csv, without its runs
    python analyze.py --theory                          # the paper's figures that need no runs
    python analyze.py --hf MODEL                        # the same quantities of a model that others trained

Models become statistics (analysis/measure.py), runs become csv files (runs.py), and from these files alone
come the tables (tables.py), the figures (plots.py) and the page (report.py).
"""
import argparse
import html
from importlib.util import find_spec
from pathlib import Path

from analysis import plots, report, runs, tables, theory
from oec.common import check, lock_folder, number, parse_args, program, user_path


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    add = p.add_argument
    optional = [column for column in runs.RESULTS if column not in runs.REQUIRED]
    add('runs', nargs='*', type=user_path, metavar='RUNS', help='run folders, or folders of them: out/demo')
    add('--results', type=user_path, metavar='FILE.csv', help='a csv of runs instead; it needs the columns '
        f'{", ".join(runs.REQUIRED)}, and may have {", ".join(optional)}')
    add('--out', type=user_path, help='folder to write to (default: in results/, called like the input)')
    add('--theory', action='store_true', help="the paper's Figures 1, 6 and 7, which need no runs")
    add('--hf', nargs='+', type=user_path, metavar='MODEL', help="others': folders, NAME or NAME@REVISION")
    add('--text', type=user_path, metavar='FILES', help='with --hf: a quoted glob of .txt, .jsonl or '
        ".parquet files (column: text); default: the source of Python's standard library")
    add('--positions', type=number(0, whole=True), help='with --hf: tokens of --text (default 16384); 0: '
        'the output embeddings alone')
    add('--center_to', type=user_path, metavar='NEW', help='with --hf: a folder for the centered model')
    return p


def check_flags(args):
    sources = [source for source in (args.runs, args.results, args.hf) if source]
    check(len(sources) == 1 or (args.theory and not sources),
          'give one of run folders, such as out/demo, --results=FILE.csv, --theory and --hf MODEL')
    check(not (args.theory and args.hf), '--theory and --hf do not go together')
    for_hf = (args.text, args.positions, args.center_to)
    check(args.hf or for_hf == (None, None, None), '--text, --positions and --center_to need --hf')


def default_out(args):
    """results/ and the name of the sweep or of the csv file."""
    path = Path(args.results or (args.runs or ['theory'])[0]).resolve()
    path = path.parent if path.name == 'results.csv' else path
    return Path('results', path.name.removesuffix('.csv'))


def main(argv=None):
    args = parse_args(parser(), argv)
    check_flags(args)
    if args.hf:
        check(find_spec('transformers'), '--hf needs transformers: pip install transformers')
        from analysis import hf
        return hf.main(args)
    out = args.out or default_out(args)

    # what there is; if it cannot be read, nothing is written
    left_out = []  # lines that say which runs, and why
    if args.runs:
        finished, left_out = runs.find(args.runs)
    if args.results:
        data = runs.read(args.results)

    items = []
    with lock_folder(out, wait=True):
        if args.runs:  # run folders -> csv files
            left_out += runs.collect(finished, out)
            data = runs.read(Path(out, 'results.csv'))
        if args.runs or args.results:  # csv files -> tables and figures
            all_runs, curves, distributions = data
            of_seeds = tables.lrs_of_seeds(all_runs)
            lrs = tables.lrs_rows(of_seeds)
            all_tables = tables.make(all_runs, lrs)
            runs.write_csv(Path(out, 'lrs.csv'), lrs)
            report.write_text(Path(out, 'tables.md'), '\n'.join(map(report.markdown, all_tables)))
            items += plots.draw(all_runs, of_seeds, curves, distributions, out) + all_tables
        if args.theory:
            items += theory.draw(out)
        report.write_page(out, left_out, items)

    for item in items:
        if 'LRS' in item['title'] and 'rows' in item:  # of the tables, those that sum all up
            print('', html.unescape(item['title']), report.for_terminal(item['rows']), sep='\n')
    print('', *left_out, f'wrote {out}; open {Path(out, "report.html")} in a browser', sep='\n')
    return 0


if __name__ == '__main__':
    program(main)
