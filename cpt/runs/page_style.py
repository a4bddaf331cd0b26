"""How a page looks, and the lines of JavaScript that let plotly draw its figures in the colours of the reader's
theme."""

STYLE = """
:root { --paper: #ffffff; --ground: #f5f6f8; --ink: #1c2330; --quiet: #5b6575; --line: #dfe3e9; --accent: #2767a8; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #1b1f27; --ground: #12151a; --ink: #e6e9ee; --quiet: #9aa4b2; --line: #323945; --accent: #7db4e8; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif;
  overflow-wrap: anywhere; }
header, main { max-width: 1240px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 28px; }
h1 { font-size: 1.25rem; font-weight: 600; color: var(--quiet); margin: 0; }
.lead { font-size: 1.55rem; line-height: 1.3; font-weight: 600; margin: 6px 0 18px; max-width: 60ch; }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: .9rem; margin-bottom: 12px; }
nav a { color: var(--accent); text-decoration: none; }
nav a:hover { text-decoration: underline; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 18px 22px; margin: 0 0 18px; }
h2 { font-size: 1.15rem; margin: 0 0 10px; }
p { margin: 0 0 10px; max-width: 85ch; }
ul { margin: 0 0 10px; padding-left: 20px; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: 12px 24px; margin: 0 0 6px; }
.long { grid-column: 1 / -1; }
dt { font-size: .8rem; color: var(--quiet); }
dd { margin: 0; font-weight: 500; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 18px 24px; margin-bottom: 12px; }
figure { margin: 0; min-width: 0; }
@media (min-width: 1020px) { .plots figure:first-child:nth-last-child(odd) { grid-column: 1 / -1; } }
figcaption { font-weight: 600; font-size: .95rem; }
.plot { width: 100%; }
small { color: var(--quiet); font-size: .85rem; display: block; }
.table { overflow-x: auto; margin-bottom: 12px; }
table { border-collapse: collapse; font-size: .92rem; min-width: 50%; overflow-wrap: normal; }
caption { text-align: left; font-weight: 600; padding-bottom: 4px; }
th, td { text-align: left; vertical-align: top; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--line); white-space: pre-wrap; }
th { color: var(--quiet); font-weight: 500; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tbody tr:last-child td { border-bottom: 0; }
.texts { margin-bottom: 12px; }
.texts table { width: 100%; table-layout: fixed; }
.texts td { font: .82rem/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
.texts td div { max-height: 16em; overflow: auto; }
pre { margin: 8px 0; padding: 12px 14px; background: var(--ground); border-radius: 8px; font-size: .85rem; line-height: 1.45;
  overflow: auto; max-height: 640px; white-space: pre-wrap; }
summary { cursor: pointer; color: var(--accent); }
@media (max-width: 600px) { .texts thead { display: none; } .texts td { display: block; border: 0; padding: 2px 0 8px; }
  .texts td::before { content: attr(data-column); color: var(--quiet); font: .8rem system-ui, sans-serif; }
  .texts tr { display: block; border-bottom: 1px solid var(--line); padding: 6px 0; }
  header, main { padding-left: 10px; padding-right: 10px; } section { padding: 14px 12px; }
  .lead { font-size: 1.25rem; } dl { grid-template-columns: 1fr 1fr; gap: 10px 14px; } }
@media print { body { background: #fff; } section { break-inside: avoid; border: 0; padding: 0; } nav { display: none; } }
"""  # noqa: E501

DRAW = """
(function () {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const places = Array.from(document.querySelectorAll(".plot"));
  function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
  function dressed(layout) {
    const ink = colour("--ink"), line = colour("--line"), paper = colour("--paper");
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line };
    const all = Object.assign({}, layout, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      font: Object.assign({}, layout.font, { color: ink, family: "system-ui, sans-serif" }),
      hoverlabel: { bgcolor: paper, bordercolor: line, font: { color: ink } } });
    all.xaxis = Object.assign({}, layout.xaxis, axis);
    all.yaxis = Object.assign({}, layout.yaxis, axis);
    return all;
  }
  function draw() {
    places.forEach(function (place) {
      const figure = JSON.parse(place.nextElementSibling.textContent);
      const height = figure.layout.height || 340;
      const options = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
      Plotly.react(place, figure.data, Object.assign(dressed(figure.layout), { height: height }), options);
    });
  }
  draw();
  dark.addEventListener("change", draw);
})();
"""  # noqa: E501
