"""How people and other programs see a run.

* `progress.py`         Progress: shows statuses while a run goes on, live or as plain lines.
* `passing.py`          Passing: passes a script's output on, beside ours.
* `display.py`          the live picture in a terminal, drawn with rich (imported only when it is needed).
* `visible.py`          text for a terminal, with what would steer it written out.
* `run_report.py`       write_report: report.html for people and summary.json for programs.
* `page.py`             run_page: the page of one run, from its sections:
* `page_charts.py`      the charts, `page_tables.py` the tables, `page_setting.py` the command and the files.
* `page_device.py`      time on the GPU, beside the CPU's.
* `run_view.py`         RunView: what a section is made from.
* `comparison_page.py`  the page of several runs.
* `study_page.py`       the page of a study.
* `markup.py`           HTML. `plots.py`: charts as inline SVG.
* `perfetto.py`         write_trace: the spans for Perfetto.
* `exports.py`          metrics for CSV, TensorBoard, Prometheus and MLflow.
"""

__all__: list[str] = []
