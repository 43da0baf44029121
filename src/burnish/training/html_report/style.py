"""The style sheet of a report, for light and dark."""

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --raised: #f5f6f8; --text: #1c2128; --faint: #5b6470; --edge: #d9dde3;
  --first: #1f6feb; --second: #d4570a; --right: #2da44e; --wrong: #d4570a; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --raised: #1e232a; --text: #e6e9ee; --faint: #9aa4b1;
  --edge: #363d48; --first: #6ea8fe; --second: #ff9d5c; --right: #3fb950; --wrong: #ff9d5c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
header, main { max-width: 1080px; margin: 0 auto; padding: 0 20px; }
h1 { font-size: 26px; margin: 28px 0 0; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 34px 0 12px; border-bottom: 1px solid var(--edge); padding-bottom: 4px; }
main { padding-bottom: 60px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: 10px; }
.tile { background: var(--raised); border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 19px; overflow-wrap: anywhere; }
.tile span { color: var(--faint); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(400px, 100%), 1fr)); gap: 14px; }
figure { margin: 0; background: var(--raised); border-radius: 8px; padding: 10px; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; }
svg .title { font-weight: 600; font-size: 14px; }
svg .tick { fill: var(--faint); }
.grid { stroke: var(--edge); stroke-width: 1; }
.line { fill: none; stroke-width: 2; }
.line-0 { stroke: var(--first); } .line-1 { stroke: var(--second); }
.dot-0 { fill: var(--first); } .dot-1 { fill: var(--second); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; }
th, td { padding: 3px 9px; text-align: left; border-bottom: 1px solid var(--edge); }
th { color: var(--faint); font-weight: 600; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.matrix th { border: 0; white-space: nowrap; }
.matrix thead th { vertical-align: bottom; padding: 3px 2px; }
.matrix thead span { writing-mode: vertical-rl; transform: rotate(180deg); }
.matrix td { min-width: 34px; text-align: center; border: 1px solid var(--ground); font-variant-numeric: tabular-nums; }
.matrix td { background: color-mix(in srgb, var(--cell) var(--share), var(--raised)); }
.matrix .right { --cell: var(--right); } .matrix .wrong { --cell: var(--wrong); }
.matrix .strong { color: #0b0f14; }
.examples { display: grid; grid-template-columns: repeat(auto-fill, minmax(170px, 1fr)); gap: 12px; }
.examples img { width: 100%; max-height: 220px; object-fit: contain; image-rendering: pixelated; border-radius: 4px; }
.examples figcaption { font-size: 14px; overflow-wrap: anywhere; }
.values { font-size: 13px; overflow-wrap: anywhere; margin: 0 0 8px; }
small { color: var(--faint); overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: minmax(120px, max-content) 1fr; gap: 2px 16px; margin: 8px 0; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
pre.command { white-space: pre-wrap; overflow-wrap: anywhere; }
pre { background: var(--raised); border-radius: 8px; padding: 12px; overflow-x: auto; font-size: 13px; }
summary { cursor: pointer; margin: 8px 0; }
"""
