"""
From checkpoints to statistics, tables, figures and a report for the browser.

    python analyze.py out/demo                          # reads models and logs, writes results/demo/
    python analyze.py --results=results.csv --out=DIR   # tables and figures of any such csv, without its runs
    python analyze.py --theory                          # the paper's figures that need no runs
    python analyze.py --hf FOLDER                       # the same quantities of a model that others trained

Models become statistics (analysis/measure.py) and runs become csv files (analysis/csv_files.py). Tables
(tables.py, shift.py), figures (plots.py) and a page (report.py) are made from these files alone.
"""
import argparse
import os
import time
from pathlib import Path

import pandas as pd

from analysis import csv_files, measure, plots, report, shift, tables, theory
from analysis.csv_files import COLUMNS, CURVE, REQUIRED, SETTINGS, SPREAD, write_csv
from oec.common import UserError, check, lock_folder, number, parse_args, program, read_json, write_json


def collect(runs, out):
    """
    Rows of csv_files.results -> the csv files and settings.json in the folder `out`. Returns what
    csv_files.read makes of them, and a line on each run that is left out, since its model is damaged.
    """
    work = runs.n_params.where([measure.kept(path.parent) is None for path in runs.index], 0)
    rows, curves, spread, settings, bad, start = [], [], [], {}, [], time.monotonic()
    for i, (path, row) in enumerate(runs.iterrows()):
        done, left = work.iloc[:i].sum(), work.iloc[i:].sum()
        minutes = (time.monotonic() - start) / 60 * left / done if done else 0
        how = f', about {minutes:.0f} min left' if minutes >= 1 else ''
        print(f'[{i + 1}/{len(runs)}] {path.parent}' + (how if work[path] else ', kept'), flush=True)
        try:
            found = measure.of_run(path.parent)
        except UserError as error:
            bad.append(f'left out: {error}')
            continue
        own = row[[*SETTINGS, 'variant']].to_dict()
        curves.append(csv_files.training_curve(path.parent).assign(**own))
        spread += [{**own, 'quantity': name, **v} for name, v in found.items() if isinstance(v, dict)]
        rows.append({**row, **{name: v['mean'] if isinstance(v, dict) else v for name, v in found.items()}})
        for name, value in read_json(path.with_name('config.json')).items():
            if name != 'out' and value is not None and value not in settings.setdefault(name, []):
                settings[name].append(value)
    check(rows, '; '.join(bad))
    runs, spread = pd.DataFrame(rows).reindex(columns=[*COLUMNS, 'variant']), pd.DataFrame(spread)
    curves = pd.concat([curve for curve in curves if len(curve)] or curves)
    runs, curves, spread = csv_files.complete(runs, curves, spread)
    write_csv(os.path.join(out, 'curves.csv'), curves[[*CURVE, *SETTINGS]], '%.7g')  # enough for a plot
    write_csv(os.path.join(out, 'distributions.csv'), spread[[*SETTINGS, *SPREAD]])
    write_csv(os.path.join(out, 'results.csv'), runs[COLUMNS])
    write_json(os.path.join(out, 'settings.json'), settings)
    return (runs, curves, spread, settings), bad


def make_tables(every_run, settings, out):
    """Writes lrs.csv and tables.md -> (rows of lrs.csv, the tables, what is left out of them)."""
    usual = tables.usual(every_run)  # runs with a shifted mean have tables of their own
    lrs, notes = tables.lrs_rows(usual)
    write_csv(os.path.join(out, 'lrs.csv'), lrs.drop(columns=['variant', 'n_params']))
    lrs = lrs[lrs.n_lrs > 1]
    overhead, more = tables.overhead_tables(usual)
    shown = [table for word, part in tables.tyings(lrs) for table in tables.lrs_tables(part, word)]
    shown += overhead + ([tables.excess_table(usual, lrs)] if len(lrs) else [])
    shown += [*shift.shift_tables(every_run), tables.method_table(), tables.hyperparameter_table(settings)]
    print('', *(report.markdown(table, 'text') for table in shown), sep='\n')
    shown.insert(0, tables.run_table(every_run))
    report.write(os.path.join(out, 'tables.md'), '\n'.join(map(report.markdown, [*shown[1:], shown[0]])))
    return lrs, shown, notes + more


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    p.add_argument('runs', nargs='*', metavar='RUNS', help='run folders, or folders of them such as out/demo')
    p.add_argument('--results', metavar='FILE.csv',
                   help=f'a csv of runs instead; it needs {", ".join(REQUIRED)}, and may have '
                        f'{", ".join(name for name in COLUMNS if name not in REQUIRED)}')
    p.add_argument('--out', help='folder to write to (default results/<name of the sweep or csv>)')
    p.add_argument('--method', help='the method whose Fact 3 is drawn (default baseline, or the first)')
    p.add_argument('--theory', action='store_true',
                   help="the paper's figures that need no runs (Fig. 1, 6 and 7), alone or with the others")
    p.add_argument('--hf', nargs='+', metavar='FOLDER',
                   help='models in Hugging Face format instead, in folders or on the hub, see analysis/hf.py')
    p.add_argument('--text', metavar='FILES',
                   help='with --hf: a quoted glob of .txt, .jsonl or .parquet files (column: text); default: '
                        "the source of Python's standard library")
    p.add_argument('--positions', type=number(least=0, whole=True),
                   help=f'with --hf: tokens of --text, 0 for none (default {measure.POSITIONS:,})')
    p.add_argument('--drop_odd_rows', action='store_true',
                   help='with --hf: leave padding and rows of one constant norm out of the mean')
    p.add_argument('--center_to', metavar='NEW',
                   help='with --hf: write the model with centered output embeddings there')
    return p


def main(argv=None):
    args = parse_args(parser(), argv)
    sources = [source for source in (args.runs, args.results, args.hf) if source]
    check(len(sources) < 2 and (sources or args.theory),
          'give run folders, such as out/demo, --results=FILE.csv, --theory or --hf=FOLDER')
    for flag in ('method', 'theory') if args.hf else ('text', 'positions', 'drop_odd_rows', 'center_to'):
        where = 'with --hf' if args.hf else 'without --hf'
        check(getattr(args, flag) in (None, False), f'--{flag} does nothing {where}')
    if args.hf:
        from analysis import hf  # which needs transformers
        return hf.main(args)

    # what there is
    source, runs, found, notes = Path(args.results or 'theory'), None, None, []
    if args.runs:
        source, states = Path(args.runs[0]), csv_files.run_states(args.runs)
        csv_files.print_states(states)
        done = [path for path, state in states.items() if state == 'done']
        check(done, f'{" ".join(args.runs)}: no finished run (one with a result.json) in there')
        runs, notes = csv_files.results(done)  # checked before anything is written
        print(*notes, sep='\n')
        notes += [f'{len(states) - len(done)} runs that are not finished'] if len(done) < len(states) else []
    elif args.results:
        found = csv_files.read(source)
        runs, source = found[0], source.parent if source.name == 'results.csv' else source.with_suffix('')
    methods = [] if runs is None else list(runs.method)
    check(args.method in [None, *methods],
          f'--method={args.method} should be one of {", ".join(dict.fromkeys(methods)) or "the runs"}')
    method = args.method or ('baseline' if 'baseline' in methods else next(iter(methods), None))
    out = args.out or os.path.join('results', source.resolve().name)

    # what is made of it
    shown, settings, sentence = [], {}, ''
    with lock_folder(out, wait=True):
        if args.runs:
            found, bad = collect(runs, out)
            notes += bad
        if found:
            runs, curves, spread, settings = found
            lrs, shown, left_out = make_tables(runs, settings, out)
            shown[1:1] = plots.draw(runs, lrs, curves, spread, method, out)  # below the table of all runs
            sentence, notes = shift.sentence(runs), notes + left_out
        if args.theory:
            shown += theory.draw_theory(out)
        report.write_report(out, shown, notes, runs, settings, sentence)
    notes += [f'wrote {out}; open {os.path.join(out, "report.html")} in a browser', sentence]
    print('\n'.join(filter(None, notes)))
    return 0


if __name__ == '__main__':
    program(main)
