"""The markup and style of a study's page: a list of sections between the parts that every report shares.

Wide tables scroll sideways under a fixed first column on a phone; on paper they shrink.
"""

from mtp_train.report.template import FOOT, HEAD, LOSSLESS, MACROS, STYLE

STUDY_STYLE = (
    STYLE
    + """
nav { margin: 1.5rem 0 1rem; font-size: .9rem; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; }
nav a, p a { color: inherit; }
.finding { border-left-width: .35rem; border-left-style: solid; padding: .3rem .9rem; margin: .7rem 0; }
.finding strong { display: block; }
.grid { width: auto; min-width: 100%; }
.grid th, .grid td { padding: .3rem .7rem; white-space: nowrap; }
.grid thead th { white-space: normal; } .grid thead th:first-child { white-space: nowrap; }
.grid tbody th { font-weight: 400; text-align: left; }
.grid .group th { font-weight: 600; padding-top: .8rem; }
.grid .group span { position: sticky; left: .7rem; white-space: normal; overflow-wrap: anywhere; }
.grid th:first-child { position: sticky; left: 0; background: var(--paper); }
.grid .name { display: inline-block; min-width: 5rem; max-width: 16rem; white-space: normal;
  overflow-wrap: break-word; }
.grid .prose { white-space: normal; text-align: left; }
.grid td.prose { min-width: 15rem; }
.figures { margin: .8rem 0 1.2rem; }
.scroll + .scroll { margin-top: 1.5rem; }
.flags { margin: .3rem 0 1rem; }
.flags h3 { font-size: 1rem; margin: 1rem 0 .2rem; overflow-wrap: anywhere; }
.flags span { font-size: .85rem; color: var(--soft); }
.flags pre { margin: .1rem 0 .5rem; padding: .5rem .7rem; background: var(--wash); border-radius: .25rem;
  font-size: .85rem; white-space: pre-wrap; overflow-wrap: anywhere; user-select: all; }
@media screen and (max-width: 640px) {
  .grid { font-size: .9rem; }
  .grid th, .grid td { padding: .3rem .55rem; }
  .grid .name { max-width: 8.5rem; }
}
@media print {
  nav { display: none; }
  .scroll { overflow: visible; }
  .arms { font-size: 9pt; } .grid, .grid thead th { font-size: 8pt; } .grid th, .grid td { padding: .15rem .3rem; }
  .grid td.prose { min-width: 0; }
  .grid th:first-child { position: static; }
  .grid .group { break-after: avoid; }
  .flags pre { break-inside: avoid; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
)

_GRID = """\
{%- macro grid_table(grid) -%}
<div class="scroll"><table class="grid">
<thead><tr>{% for column in grid.columns -%}
<th{% if grid.prose and loop.last %} class="prose"{% endif %}>{{ column }}</th>
{%- endfor %}</tr></thead>
{% for group in grid.groups -%}
<tbody>
{% if group.title -%}
<tr class="group"><th scope="rowgroup" colspan="{{ grid.columns | length }}"><span>{{ group.title }}</span></th></tr>
{% endif -%}
{% for row in group.rows -%}
<tr><th scope="row"><span class="name">{{ row.name }}</span></th>
{%- for cell in row.cells -%}
<td{% if grid.prose and loop.last %} class="prose"{% endif %}>{{ cell }}</td>
{%- endfor %}</tr>
{% endfor -%}
</tbody>
{% endfor -%}
</table></div>
{%- endmacro -%}
"""

_SECTIONS = """\
{% if findings -%}
<h2>Further findings</h2>
{% for finding in findings -%}
<div class="finding {{ finding.tone }}"><strong>{{ finding.title }}</strong>{{ finding.detail }}</div>
{% endfor -%}
{% endif -%}
<nav>
{% for section in sections %}<a href="#{{ section.anchor }}">{{ section.title }}</a>
{% endfor -%}
</nav>
{% if setting_sentence %}<p>{{ setting_sentence }}</p>{% endif %}
{% for section in sections -%}
<h2 id="{{ section.anchor }}">{{ section.title }}</h2>
{% for note in section.notes %}<p>{{ note }}</p>
{% endfor -%}
{% if section.arms %}{{ arm_table(section.arms) }}
{% endif -%}
{% if section.figures %}{{ figure_row(section.figures) }}
{% endif -%}
{% if section.positions %}{{ position_table() }}
{% endif -%}
{% for grid in section.grids %}{{ grid_table(grid) }}
{% endfor -%}
{% if section.flags %}<div class="flags">
{% for entry in section.flags -%}
<h3>{{ entry.title }}</h3>
{% for engine, text in entry.flags %}<span>{{ engine }}</span><pre>{{ text }}</pre>
{% endfor -%}
{% endfor -%}
</div>
{% endif -%}
{% if section.rows %}{{ rows_table(section.rows) }}
{% endif -%}
{% endfor -%}
"""

STUDY_PAGE = MACROS + _GRID + HEAD + _SECTIONS + LOSSLESS + FOOT
