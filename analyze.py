"""
From checkpoints to statistics, tables, figures and a page for the browser.

    python analyze.py out/demo                          # reads models and logs, writes results/demo/
    python analyze.py --results=results.csv --out=DIR   # tables and figures of any such csv, without its runs
    python analyze.py --hf MODEL                        # the same quantities of a model that others trained

Models become statistics (analysis/measure.py), runs become csv files (runs.py), and from these files alone
come the tables (tables.py), the figures (plots.py) and the page (report.py).
"""
import argparse
import html
from importlib.util import find_spec
from pathlib import Path

from analysis import plots, report, runs, tables
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
    add('--hf', nargs='+', type=user_path, metavar='MODEL', help="others': folders, NAME or NAME@REVISION")
    add('--text', type=user_path, metavar='FILES', help='with --hf: a quoted glob of .txt, .jsonl or '
        ".parquet files (column: text); default: the source of Python's standard library")
    add('--positions', type=number(0, whole=True), help='with --hf: tokens of --text (default 16384); 0: '
        'the output embeddings alone')
    add('--center_to', type=user_path, metavar='NEW', help='with --hf: a folder for the centered model')
    return p


def main(argv=None):
    args = parse_args(parser(), argv)
    sources = [source for source in (args.runs, args.results, args.hf) if source]
    check(len(sources) == 1, 'give one of run folders, such as out/demo, --results=FILE.csv and --hf MODEL')
    for_hf = (args.text, args.positions, args.center_to)
    check(args.hf or for_hf == (None, None, None), '--text, --positions and --center_to need --hf')
    if args.hf:
        check(find_spec('transformers'), '--hf needs transformers: pip install transformers')
        from analysis import hf
        return hf.main(args)
    source = Path(args.results or args.runs[0]).resolve()
    source = source.parent if source.name == 'results.csv' else source
    out = args.out or Path('results', source.name.removesuffix('.csv'))

    # read all inputs before anything is written
    left_out = []  # lines that say which runs, and why
    if args.runs:
        finished, left_out = runs.find(args.runs)
    else:
        data = runs.read(args.results)

    with lock_folder(out, wait=True):
        if args.runs:  # run folders -> csv files
            left_out += runs.collect(finished, out)
            data = runs.read(Path(out, 'results.csv'))
        all_runs, curves, distributions = data  # csv files -> tables and figures
        unusual = all_runs.variant[~all_runs.in_paper_setting].unique()
        if len(unusual):
            left_out.append("not in the paper's setting, so only among the training curves and in the table "
                            f'of all runs: {"; ".join(unusual)}')
        of_seeds = tables.lrs_of_seeds(all_runs)
        lrs = tables.lrs_rows(of_seeds)
        all_tables = tables.make(all_runs, lrs)
        runs.write_csv(Path(out, 'lrs.csv'), lrs)
        report.write_text(Path(out, 'tables.md'), '\n'.join(map(report.markdown, all_tables)))
        figures = plots.draw(all_runs, of_seeds, curves, distributions, out)
        report.write_page(out, left_out, figures + all_tables)

    for table in all_tables:
        if 'LRS' in table['title']:  # the summary tables
            print('', html.unescape(table['title']), report.for_terminal(table['rows']), sep='\n')
    print('', *left_out, f'wrote {out}; open {Path(out, "report.html")} in a browser', sep='\n')
    return 0


if __name__ == '__main__':
    program(main)
