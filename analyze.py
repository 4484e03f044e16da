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
from analysis.csv_files import COLUMNS, REQUIRED, SETTINGS
from oec.common import UserError, check, lock_folder, number, parse_args, program, read_json


def collect(runs, out, notes):
    """Rows of csv_files.results -> what csv_files.read returns; writes it to `out`, and damage to `notes`."""
    work = runs.n_params.where([measure.kept(path.parent) is None for path in runs.index], 0)
    rows, curves, spread, settings, start = [], [], [], {}, time.monotonic()
    for i, (path, row) in enumerate(runs.iterrows()):
        done, left = work.iloc[:i].sum(), work.iloc[i:].sum()
        minutes = (time.monotonic() - start) / 60 * left / done if done else 0
        how = f', about {minutes:.0f} min left' if minutes >= 1 else ''
        print(f'[{i + 1}/{len(runs)}] {path.parent}' + (how if work[path] else ', kept'), flush=True)
        try:
            found = measure.of_run(path.parent)
        except UserError as error:
            notes.append(f'left out: {error}')
            continue
        own = row[[*SETTINGS, 'variant']].to_dict()
        curves.append(csv_files.training_curve(path.parent).assign(**own))
        spread += [{**own, 'quantity': name, **v} for name, v in found.items() if isinstance(v, dict)]
        rows.append({**row, **{name: v['mean'] if isinstance(v, dict) else v for name, v in found.items()}})
        for name, value in read_json(path.with_name('config.json')).items():
            if name != 'out' and value is not None and value not in settings.setdefault(name, []):
                settings[name].append(value)
    check(rows, '; '.join(notes))
    rows = pd.DataFrame(rows).reindex(columns=[*COLUMNS, 'variant'])
    curves = pd.concat([curve for curve in curves if len(curve)] or curves)
    found = *csv_files.complete(rows, curves, pd.DataFrame(spread)), settings
    csv_files.write(out, *found)
    return found


def make_tables(every_run, settings, out):
    """Writes lrs.csv and tables.md -> (rows of lrs.csv, the tables, what is left out of them)."""
    usual = tables.usual(every_run)  # runs with a shifted mean have tables of their own
    lrs, notes = tables.lrs_rows(usual)
    csv_files.write_csv(os.path.join(out, 'lrs.csv'), lrs.drop(columns=['variant', 'n_params']))
    lrs, (overhead, more) = lrs[lrs.n_lrs > 1], tables.overhead_tables(usual)
    shown = [table for word, part in tables.tyings(lrs) for table in tables.lrs_tables(part, word)]
    shown += [*overhead, tables.method_table(), tables.hyperparameter_table(settings)]
    shown += shift.shift_tables(every_run)
    print('', *(report.markdown(table, 'text') for table in shown), sep='\n')
    shown.append(tables.run_table(every_run))
    report.write(os.path.join(out, 'tables.md'), '\n'.join(map(report.markdown, shown)))
    return lrs, shown, notes + more


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    add = p.add_argument
    add('runs', nargs='*', metavar='RUNS', help='run folders, or folders of them such as out/demo')
    add('--results', metavar='FILE.csv', help='a csv of runs instead; it needs '
        f'{", ".join(REQUIRED)}, and may have {", ".join(c for c in COLUMNS if c not in REQUIRED)}')
    add('--out', help='folder to write to (default results/<name of the sweep or csv>)')
    add('--method', help='the method whose Fact 3 is drawn (default baseline, or the first)')
    add('--theory', action='store_true', help="the paper's Figures 1, 6 and 7, which need no runs")
    add('--hf', nargs='+', metavar='FOLDER', help='folders or hub names of models that others trained')
    add = p.add_argument_group('with --hf').add_argument
    add('--text', metavar='FILES', help='a quoted glob of .txt, .jsonl or .parquet files (column: text); '
        "default: the source of Python's standard library")
    add('--positions', type=number(least=0, whole=True),
        help=f'tokens of --text, 0 for none (default {measure.POSITIONS:,})')
    add('--drop_odd_rows', action='store_true', help='leave padding and rows of one norm out of the mean')
    add('--center_to', metavar='NEW', help='write the model with centered output embeddings there')
    return p


def main(argv=None):
    args = parse_args(parser(), argv)
    sources = [source for source in (args.runs, args.results, args.hf) if source]
    check(len(sources) < 2 and (sources or args.theory),
          'give run folders, such as out/demo, --results=FILE.csv, --theory or --hf=FOLDER')
    for flag in ('method', 'theory') if args.hf else ('text', 'positions', 'drop_odd_rows', 'center_to'):
        check(getattr(args, flag) in (None, False),
              f'--{flag} does nothing {"beside" if args.hf else "without"} --hf')
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
    shown, settings = [], {}
    with lock_folder(out, wait=True):
        found = collect(runs, out, notes) if args.runs else found
        if found:
            runs, curves, spread, settings = found
            lrs, shown, left_out = make_tables(runs, settings, out)
            shown = [shown.pop(), *plots.draw(runs, lrs, curves, spread, method, out), *shown]  # runs first
            notes += left_out
        if args.theory:
            shown += theory.draw_theory(out)
        report.write_report(out, shown, notes, runs, settings)
    print(*notes, f'wrote {out}; open {os.path.join(out, "report.html")} in a browser', sep='\n')
    return 0


if __name__ == '__main__':
    program(main)
