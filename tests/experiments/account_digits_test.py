import json
import subprocess
import sys


def test_the_distances_it_writes_give_the_statement_it_prints(tmp_path):
  output = tmp_path / 'distances.npz'
  flags = ['--rounds=10', '--clients=30', '--noise_multiplier=1.5']
  printed = subprocess.check_output(
    [
      *(sys.executable, '-m', 'experiments.account_digits'),
      *flags,
      f'--output={output}',
    ],
    text=True,
    stderr=subprocess.DEVNULL,
  )
  report = json.loads(
    subprocess.check_output(
      [
        *(sys.executable, '-m', 'tf_bdp.analysis.compute_bdp_privacy'),
        *('--noise_multiplier=1.5', '--participation_probability=0.2'),
        *('--delta=1e-3', '--format=json', f'--distances_file={output}'),
      ]
    )
  )
  for row in report['rows']:
    assert f'{row["epsilon"]:12.3f}' in printed, row['method']
  assert 'Test accuracy' in printed
