"""
From checkpoints to statistics, tables, figures and a page for the browser.

    python analyze.py out/demo                          # reads models and logs, writes results/demo/
    python analyze.py --results=results.csv --out=DIR   # tables and figures of any such csv, without its runs
    python analyze.py --theory                          # the paper's figures that need no runs
    python analyze.py --hf FOLDER                       # the same quantities of a model that others trained

Models become statistics (analysis/measure.py), runs become csv files (runs.py), and these alone become tables
(tables.py), figures (plots.py) and a page (report.py).
"""
import argparse
from pathlib import Path

from analysis import plots, report, runs, tables, theory
from oec.common import check, lock_folder, number, parse_args, program


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    add = p.add_argument
    add('runs', nargs='*', metavar='RUNS', help='run folders, or folders of them such as out/demo')
    add('--results', metavar='FILE.csv', help=f'a csv of runs instead; it needs {", ".join(runs.REQUIRED)}, '
        f'and may have {", ".join(column for column in runs.RESULTS if column not in runs.REQUIRED)}')
    add('--out', help='folder to write to (default results/<name of the sweep or csv>)')
    add('--theory', action='store_true', help="the paper's Figures 1, 6 and 7, which need no runs")
    add('--hf', nargs='+', metavar='FOLDER', help='folders or hub names of models that others trained')
    add('--text', metavar='FILES', help='with --hf: a quoted glob of .txt, .jsonl or .parquet files (column: '
        "text); default: the source of Python's standard library")
    add('--positions', type=number(least=1, whole=True), default=16384, help='with --hf: tokens of --text')
    add('--center_to', metavar='NEW', help='with --hf: write the model with centered output embeddings there')
    return p


def make_tables(all_runs, out):
    """Writes lrs.csv and tables.md -> (LRS of each seed, the tables)."""
    of_seeds = tables.lrs_of_seeds(all_runs)
    lrs = tables.lrs_rows(of_seeds)
    runs.write_csv(Path(out, 'lrs.csv'), lrs)
    made = tables.make(all_runs, lrs)
    report.write(Path(out, 'tables.md'), '\n'.join(map(report.markdown, made)))
    for table in made:
        if 'LRS' in table['title']:
            print('', report.plain(report.markdown(table)), sep='\n')
    return of_seeds, made


def default_out(args):
    """results/ and the name of the sweep or of the csv file."""
    if args.runs:
        named = Path(args.runs[0])
    elif args.results:
        csv = Path(args.results)
        named = csv.parent if csv.name == 'results.csv' else csv.with_suffix('')
    else:
        named = Path('theory')
    return Path('results', named.resolve().name)


def main(argv=None):
    args = parse_args(parser(), argv)
    sources = [source for source in (args.runs, args.results, args.hf) if source]
    check(len(sources) == 1 or (args.theory and not sources),
          'give run folders, such as out/demo, --results=FILE.csv, --theory or --hf FOLDER')
    check(args.hf or not (args.text or args.center_to), '--text and --center_to need --hf')
    if args.hf:
        from analysis import hf  # which needs transformers
        return hf.main(args)

    out = args.out or default_out(args)
    csv = args.results
    notes = []  # what was left out
    shown = []  # the tables and figures of the report

    # run folders -> csv files
    if args.runs:
        done, unfinished = runs.find(args.runs)
        check(done, f'{" ".join(args.runs)}: no finished run (one with a result.json) in there')
        notes += [f'not finished: {folder}' for folder in unfinished]
        with lock_folder(out, wait=True):
            notes += runs.collect(done, out)
        csv = Path(out, 'results.csv')

    # csv files -> tables and figures; what cannot be read gets no folder
    if csv:
        all_runs, curves, spread = runs.read(csv)
    with lock_folder(out, wait=True):
        if csv:
            lrs, shown = make_tables(all_runs, out)
            shown[1:1] = plots.draw(all_runs, lrs, curves, spread, out)  # after the table of runs
        if args.theory:
            shown += theory.draw(out)
        report.write_report(out, '<br>\n'.join(notes), shown)
    print(*notes, f'wrote {out}; open {Path(out, "report.html")} in a browser', sep='\n')
    return 0


if __name__ == '__main__':
    program(main)
