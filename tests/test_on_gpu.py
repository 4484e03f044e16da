"""on_gpu.sh from its first part to its page, on a CPU; the page about GPUs has nothing that is in no file."""
import os
import re
import shutil
import subprocess

import on_gpu
from conftest import ENV, ROOT


def run(folder, minutes, parts):
    """Runs the script with its results and its work in `folder`; returns what it printed."""
    env = {**ENV, 'DEVICE': 'cpu', 'MINUTES': minutes, 'OUT': f'{folder}/out', 'WORK': f'{folder}/work',
           'PARTS': parts}
    done = subprocess.run(['bash', 'tests/on_gpu.sh'], cwd=ROOT, env=env, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_parts_on_a_cpu_and_none_where_there_is_no_time(tmp_path):
    printed = run(tmp_path, '4', 'tests steps text shift long')  # without the heads, which compile longest
    page = (tmp_path / 'out' / 'README.md').read_text(encoding='utf-8')
    assert 'left out' not in printed and page.endswith(printed[printed.index('## cpu'):])
    passed, skipped = re.search(r'The tests: (\d+) passed, (\d+) skipped', page).groups()
    assert int(passed) >= 18 and int(skipped) >= 15  # what only CUDA can tell does not count as passed
    rows = [re.split(r' *\| *', line.strip('| ')) for line in page.splitlines() if line[:1] == '|']
    steps = {row[1]: row for row in rows if row[0] == 'tiny'}
    assert list(steps) == ['baseline', 'mu_centering'] and steps['baseline'][3] == '1.000'
    runs = {(row[0], row[4]): row for row in rows if len(row) == 9}
    assert float(runs['baseline', '1000'][6]) == 1000  # where the shift was
    assert float(runs['mu_centering', '0'][6]) < 1e-5 and float(runs['mu_centering', '0'][5]) < 5.5
    assert float(runs['baseline', '0'][3]) == float(runs['mu_centering', '0'][3]) == 1.05

    again = run(tmp_path, '0', 'tests steps heads text shift long')
    left_out = re.findall(r'left out: (.*?) \(', again)
    assert [line.split()[0] for line in left_out] == [
        'tests', 'step', 'head', 'tokens:', 'baseline-shift1000', 'long', 'long', 'tables']
    assert printed[printed.index('The tests'):] in again  # nothing that was measured before is lost


def test_the_page_about_gpus_is_what_the_files_of_each_device_say(tmp_path):
    page = os.path.join(ROOT, 'results', 'gpu')
    shutil.copytree(page, tmp_path / 'gpu')
    on_gpu.report(str(tmp_path / 'gpu'))
    with open(os.path.join(page, 'README.md'), encoding='utf-8') as file:
        assert (tmp_path / 'gpu' / 'README.md').read_text(encoding='utf-8') == file.read()
