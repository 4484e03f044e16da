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
from pathlib import Path

import pandas as pd

from analysis import csv_files, measure, plots, report, shift, tables, theory
from oec.common import check, lock_folder, number, parse_args, program, read_json, write_json


def collect(folders, results, out):
    """
    Finished runs and their result.json -> csv files and settings.json in the folder `out` -> what
    csv_files.read makes of them.
    """
    rows, curves, distributions, settings = [], [], [], {}
    for i, (folder, row) in enumerate(zip(folders, results, strict=True), 1):
        print(f'[{i}/{len(folders)}] {folder}', flush=True)
        found, own = measure.of_run(folder), {name: row.get(name) for name in csv_files.SETTINGS}
        curves.append(csv_files.training_curve(folder).assign(**own))
        distributions += [{**own, 'quantity': name, **v} for name, v in found.items() if isinstance(v, dict)]
        rows.append({**row, **{name: v['mean'] if isinstance(v, dict) else v for name, v in found.items()}})
        for name, value in read_json(folder / 'config.json').items():
            if name != 'out' and value not in settings.setdefault(name, []):
                settings[name].append(value)
    frames = {'results': pd.DataFrame(rows).reindex(columns=csv_files.COLUMNS),
              'curves': pd.concat(curves), 'distributions': pd.DataFrame(distributions)}
    for name, frame in frames.items():
        digits = '%.7g' if name == 'curves' else None  # enough for a plot, in half the bytes
        csv_files.write_csv(os.path.join(out, f'{name}.csv'), frame, digits)
    write_json(os.path.join(out, 'settings.json'), settings)
    found = csv_files.read(os.path.join(out, 'results.csv'))
    csv_files.write_csv(os.path.join(out, 'results.csv'), found[0][csv_files.COLUMNS])  # now with `diverged`
    return found


def make_tables(every_run, settings, out):
    """Writes lrs.csv and tables.md -> (rows of lrs.csv, the tables, what is left out of them)."""
    usual = tables.usual(every_run)  # runs with a shifted mean have tables of their own
    lrs, notes = tables.lrs_rows(usual)
    csv_files.write_csv(os.path.join(out, 'lrs.csv'), lrs.drop(columns=['variant', 'n_params']))
    lrs = lrs[lrs.n_lrs > 1]
    overhead, more = tables.overhead_tables(usual)
    shown = [table for word, part in tables.tyings(lrs) for table in tables.lrs_tables(part, word)]
    shown += overhead + ([tables.excess_table(usual, lrs)] if len(lrs) else [])
    shown += shift.shift_tables(every_run)
    shown += [tables.hyperparameter_table(settings)] if settings else []
    print('', *(report.markdown(table, 'text') for table in shown), sep='\n')
    markdown = map(report.markdown, [*shown, tables.run_table(every_run)])
    report.write(os.path.join(out, 'tables.md'), '\n'.join(markdown))
    return lrs, shown, notes + more


def parser():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    p.add_argument('runs', nargs='*', metavar='RUNS', help='run folders, or folders of them such as out/demo')
    p.add_argument('--results', metavar='FILE.csv',
                   help=f'a csv of runs instead; it needs {", ".join(csv_files.REQUIRED)}, no more')
    p.add_argument('--out', help='folder to write to (default results/<name of the sweep or csv>)')
    p.add_argument('--method', help='the method whose Fact 3 is drawn (default baseline, or the first)')
    p.add_argument('--theory', action='store_true',
                   help="the paper's figures that need no runs (Fig. 1, 6 and 7), alone or with the others")
    p.add_argument('--hf', nargs='+', metavar='FOLDER',
                   help='models in Hugging Face format instead, in folders or on the hub, see analysis/hf.py')
    p.add_argument('--text', metavar='FILES',
                   help='with --hf: a quoted glob of .txt, .jsonl or .parquet files (column: text); default: '
                        "the source of Python's standard library")
    p.add_argument('--positions', type=number(least=0, whole=True), default=measure.POSITIONS,
                   help=f'with --hf: tokens of --text, 0 for none (default {measure.POSITIONS:,})')
    p.add_argument('--drop_odd_rows', action='store_true',
                   help='with --hf: leave padding and rows of one constant norm out of the mean')
    p.add_argument('--center_to', metavar='NEW',
                   help='with --hf: write the model with centered output embeddings there')
    return p


def main(argv=None):
    args = parse_args(parser(), argv)
    sources = [source for source in (args.runs, args.results, args.hf) if source]
    mixed = args.theory or args.method if args.hf else args.text or args.drop_odd_rows or args.center_to
    check(len(sources) < 2 and (sources or args.theory) and not mixed,
          'give run folders, such as out/demo, --results=FILE.csv or --theory; or --hf=FOLDER, which alone '
          'goes with --text, --positions, --drop_odd_rows and --center_to')
    if args.hf:
        from analysis import hf  # which needs transformers
        return hf.main(args)

    # what there is
    source, done, methods, notes = Path(args.results or 'theory'), [], [], []
    if args.runs:
        source, states = Path(args.runs[0]), csv_files.run_states(args.runs)
        csv_files.print_states(states)
        done = [path for path, state in states.items() if state == 'done']
        check(done, f'{" ".join(args.runs)}: no finished run (one with a result.json) in there')
        notes += [f'{len(states) - len(done)} runs that are not finished'] if len(done) < len(states) else []
        results = csv_files.results(done)  # checked before anything is written
        methods = [row['method'] for row in results]
    elif args.results:
        found = csv_files.read(source)
        source = source.parent if source.name == 'results.csv' else source.with_suffix('')
        methods = list(found[0].method)
    check(args.method in [None, *methods],
          f'--method={args.method} should be one of {", ".join(dict.fromkeys(methods))}')
    method = args.method or ('baseline' if 'baseline' in methods else next(iter(methods), None))
    out = args.out or os.path.join('results', source.resolve().name)

    # what is made of it
    with lock_folder(out, wait=True):
        shown, every_run, all_runs, settings, sentence = [], [], None, {}, ''
        if methods:
            every_run, curves, distributions, settings = collect(done, results, out) if done else found
            lrs, made, more = make_tables(every_run, settings, out)
            drawn, lacking = plots.draw(every_run, lrs, curves, distributions, method, out)
            shown, all_runs, sentence = drawn + made, tables.run_table(every_run), shift.sentence(every_run)
            notes += more + (['figures that lack data: ' + ', '.join(lacking)] if lacking else [])
        if args.theory:
            shown += theory.draw_theory(out)
        report.write_report(out, every_run, shown, all_runs, settings, notes, sentence)
    notes += [f'wrote {out}; open {os.path.join(out, "report.html")} in a browser', sentence]
    print('\n'.join(filter(None, notes)))
    return 0


if __name__ == '__main__':
    program(main)
