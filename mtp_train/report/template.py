"""The page's markup and style: a Jinja template, filled by :mod:`mtp_train.report.page` with autoescaping on.

The page asks nothing of the network and runs no script. Below 640 pixels each row of an arm table becomes a card.
"""

STYLE = """
:root { color-scheme: light; --paper: #fff; --ink: #1f2328; --soft: #57606a; --line: #d5dae0; --wash: #f5f7f9;
  --focus: #eef5fb; --good: #1a7f37; --bad: #cf222e; }
@media screen and (prefers-color-scheme: dark) {
  :root { color-scheme: dark; --paper: #141414; --ink: #e6e6e6; --soft: #a3a9b1; --line: #3a3f45; --wash: #1f2124;
    --focus: #16283a; --good: #3fb950; --bad: #f85149; }
  /* The figures' white becomes the paper's colour; hues stay what the legends say. */
  figure img { filter: invert(.92) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 66rem; padding: 1.5rem 1.25rem 4rem; color: var(--ink); background: var(--paper);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.05rem; font-weight: 600; color: var(--soft); margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .6rem; }
p { margin: .4rem 0; max-width: 46rem; overflow-wrap: anywhere; }
.verdict { border-left: .5rem solid; border-radius: .25rem; padding: 1rem 1.25rem; background: var(--wash); }
.verdict strong { display: block; font-size: 1.55rem; line-height: 1.25; margin-bottom: .35rem; }
.good { border-color: var(--good); } .bad { border-color: var(--bad); } .neutral { border-color: var(--soft); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .5rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
thead th { font-size: .85rem; font-weight: 600; color: var(--soft); vertical-align: bottom; }
tbody th { font-weight: 600; overflow-wrap: anywhere; }
tbody th small { display: block; font-weight: 400; color: var(--soft); }
.key { display: flex; flex-wrap: wrap; gap: .5rem 2.5rem; margin: 1.25rem 0 0; color: var(--soft); }
.key b { display: block; font-size: 2rem; line-height: 1.2; color: var(--ink); }
.arms th:first-child { width: 15rem; } .arms td { white-space: nowrap; }
.positions { width: auto; white-space: nowrap; }
.positions th, .positions td { padding: .15rem .9rem .15rem .6rem; border-bottom: 0; }
.positions tbody th:not([rowspan]), .positions .kind { text-align: left; font-weight: 400; }
.positions tbody { border-bottom: 1px solid var(--line); }
.focus td, .focus th { background: var(--focus); }
.scroll { overflow-x: auto; }
.settings td { text-align: left; overflow-wrap: anywhere; } .settings th { width: 16rem; }
.settings th, .settings td { padding: .25rem .6rem; font-size: .9rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; } figure img { width: 100%; max-width: 32rem; height: auto; display: block; }
figcaption { font-size: .9rem; color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .35rem 1.25rem; margin: 0; }
dt { font-weight: 600; } dd { margin: 0; max-width: 42rem; }
@media screen and (max-width: 640px) {
  body { padding: 1rem .9rem 3rem; }
  .verdict strong { font-size: 1.3rem; }
  .arms thead { display: none; }
  .arms, .arms tbody, .arms tr, .arms th, .arms td { display: block; }
  .arms tr { border: 1px solid var(--line); border-radius: .4rem; margin-bottom: .8rem; overflow: hidden; }
  .arms td { display: flex; justify-content: space-between; gap: 1rem; border-bottom: 0; padding: .25rem .7rem; }
  .arms .void { display: none; }
  .arms th:first-child { width: auto; }
  .arms td::before { content: attr(data-label); color: var(--soft); }
  .arms tbody th { text-align: left; }
  .positions { font-size: .85rem; } .positions th, .positions td { padding: .15rem .8rem .15rem 0; }
  .settings th { width: 45%; font-weight: 400; color: var(--soft); }
  dl { display: block; } dd { margin: 0 0 .6rem; }
}
@media print {
  body { font-size: 10.5pt; padding: 0; max-width: none; }
  h2 { break-after: avoid; } tr, figure, .verdict { break-inside: avoid; }
  .verdict, .focus td, .focus th { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .figures { grid-template-columns: 1fr 1fr; }
}
"""

MACROS = """\
{%- macro arm_table(rows) -%}
<table class="arms">
<thead><tr><th>arm</th>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows -%}
<tr{% if row.focus %} class="focus"{% endif %}>
<th scope="row">{{ row.name }}{% if row.note %} ({{ row.note }}){% endif %}
<small>{{ row.trunk }}{% if row.head %}<br>head: {{ row.head }}{% endif %}</small></th>
{% for cell in row.cells -%}
<td data-label="{{ columns[loop.index0] }}"{% if cell == "-" %} class="void"{% endif %}>{{ cell }}</td>
{% endfor -%}
</tr>
{% endfor -%}
</tbody>
</table>
{%- endmacro -%}
{%- macro rows_table(rows) -%}
<table class="settings"><tbody>
{% for name, value in rows %}<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{% endfor -%}
</tbody></table>
{%- endmacro -%}
{%- macro figure_row(shown) -%}
<div class="figures">
{% for figure in shown -%}
<figure><img alt="{{ figure.caption }}" src="data:image/png;base64,{{ figure.base64 }}">
<figcaption>{{ figure.caption }}</figcaption></figure>
{% endfor -%}
</div>
{%- endmacro -%}
{%- macro position_table() -%}
<div class="scroll"><table class="positions">
<thead><tr><th>arm</th><th class="kind">figure</th>
{%- for k in range(1, depth + 1) %}<th>{{ k }}</th>{% endfor %}</tr></thead>
{% for name, lines in by_position -%}
<tbody>
{% for kind, cells in lines -%}
<tr>{% if loop.first %}<th scope="rowgroup" rowspan="{{ lines | length }}">{{ name }}</th>{% endif -%}
<th scope="row">{{ kind }}</th>{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor -%}
</tbody>
{% endfor -%}
</table></div>
{%- endmacro -%}
"""

HEAD = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>mtp-train: {{ headline.title }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<h1>mtp-train report{% if subject %}: {{ subject }}{% endif %}</h1>
<div class="verdict {{ headline.tone }}"><strong>{{ headline.title }}</strong>{{ headline.detail }}</div>
{% if key_figures -%}
<div class="key">
{% for value, meaning in key_figures %}<div><b>{{ value }}</b>{{ meaning }}</div>
{% endfor -%}
</div>
{% endif -%}

"""

LOSSLESS = """\
<h2>Is it lossless?</h2>
<p>{{ lossless_sentence }}</p>
"""

FOOT = """\
{% if settings -%}
<h2>Settings</h2>
{{ rows_table(settings) }}
{% endif -%}
{% if provenance -%}
<h2>Provenance</h2>
{{ rows_table(provenance) }}
{% endif -%}

<h2>How to read this</h2>
<dl>
{% for word, meaning in glossary %}<dt>{{ word }}</dt><dd>{{ meaning }}</dd>
{% endfor -%}
</dl>
</body>
</html>
"""

_BODY = """\
{% if alike -%}
<h2>Same trunk, same prompts</h2>
{{ arm_table(alike) }}
{% endif -%}
{% if apart -%}
<h2>Another trunk, shown apart</h2>
<p>{{ apart_sentence }}</p>
{{ arm_table(apart) }}
{% endif -%}
{% if recorded -%}
<h2>Recorded, not measured here</h2>
<p>{{ recorded_sentence }}</p>
{{ arm_table(recorded) }}
{% endif -%}

{% for setting, arms in served -%}
<h2>The same at {{ setting }}</h2>
{{ arm_table(arms) }}
{% endfor -%}

{% if figures -%}
<h2>Figures</h2>
{{ figure_row(figures) }}
{% endif -%}

{% if by_position -%}
<h2>By position in the draft</h2>
{{ position_table() }}
{% endif -%}

"""

_GATE = """\
{% if gate -%}
<h2>The gate</h2>
<p>{{ "Passed" if gate.passed else "Refused" }} against {{ gate.baseline }}. {{ gate_reason }}</p>
{% if gate_rows -%}
<div class="scroll"><table class="positions">
<thead><tr>{% for column in gate_columns %}<th>{{ column }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in gate_rows -%}
<tr>{% for cell in row %}{% if loop.first %}<th scope="row">{{ cell }}</th>{% else %}<td>{{ cell }}</td>{% endif %}
{%- endfor %}</tr>
{% endfor -%}
</tbody>
</table></div>
<p>{{ power }} The gate passes when the interval of the gain, paired by prompt and over groups of prompts, lies above 0
at one setting at least (Holm's correction over the settings) and below 0 at none. The last column is the gain that
would be seen with probability 0.8.</p>
{% endif -%}
{% endif -%}

"""

_HELD_OUT = """\
{% if held_out_sentence -%}
<h2>Is the text new to the head?</h2>
<p>{{ held_out_sentence }}</p>
{% endif -%}

"""

PAGE = MACROS + HEAD + _BODY + LOSSLESS + _HELD_OUT + _GATE + FOOT
