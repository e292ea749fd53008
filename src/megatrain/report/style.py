"""The page's style sheet: one for light and one for dark, by what the reader's system says; and for paper."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark;
  --page:#f6f6f3; --card:#ffffff; --ink:#16181d; --soft:#5c626d; --faint:#8b919c; --rule:#e4e4df; --track:#ececE7;
  --s1:#2563c9; --s2:#c2570c; --s3:#0f8a6d; --s4:#7c4dbd; --s5:#b0871b; --s6:#64748b; --s7:#c43d6b; --s8:#3a9bc1;
  --good:#0f7a4f; --goodbg:#e2f4ea; --warn:#8f5b00; --warnbg:#fdf0d5; --bad:#b3261e; --badbg:#fbe4e2; }
@media (prefers-color-scheme: dark) { :root {
  --page:#101215; --card:#191c21; --ink:#e8eaed; --soft:#a3a9b4; --faint:#757c88; --rule:#2a2e35; --track:#272b32;
  --s1:#6ea1ff; --s2:#f2954b; --s3:#3fc7a2; --s4:#b794f6; --s5:#e0bd56; --s6:#94a3b8; --s7:#f07fa4; --s8:#6cc6e8;
  --good:#57d39b; --goodbg:#12301f; --warn:#f0bf62; --warnbg:#33270e; --bad:#ff8a80; --badbg:#3a1715; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif; }
main { max-width:1180px; margin:0 auto; padding:34px 22px 60px; }
header { display:flex; flex-wrap:wrap; align-items:baseline; gap:6px 14px; margin-bottom:4px; }
h1 { font-size:26px; line-height:1.2; letter-spacing:-.01em; margin:0; }
h2 { font-size:15px; margin:0 0 2px; }
.sub, .note { color:var(--soft); } .sub { margin:0 0 22px; } .note { font-size:13px; margin:0 0 8px; }
.badge { font-size:12px; font-weight:600; padding:2px 9px; border-radius:99px; background:var(--track);
  color:var(--soft); }
.badge.good { color:var(--good); background:var(--goodbg); } .badge.warn { color:var(--warn);
  background:var(--warnbg); }
.badge.bad { color:var(--bad); background:var(--badbg); }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(142px,1fr)); gap:12px; margin-bottom:14px; }
.tile, .card { background:var(--card); border:1px solid var(--rule); border-radius:10px; }
.tile { padding:12px 15px; } .tile b { display:block; font-size:22px; font-weight:650; letter-spacing:-.01em;
  font-variant-numeric:tabular-nums; line-height:1.25; } .tile span { color:var(--soft); font-size:13px; }
.tile small { color:var(--faint); font-size:12px; display:block; }
.grid { display:grid; grid-template-columns:repeat(2,minmax(0,1fr)); gap:14px; }
.card { padding:15px 17px; min-width:0; display:flex; flex-direction:column; }
.card > .chart { margin-top:auto; } .wide { grid-column:1/-1; }
@media (max-width:800px) { .grid { grid-template-columns:minmax(0,1fr); }
  .wide { overflow-x:auto; } .wide .chart { min-width:680px; } }
svg { display:block; width:100%; height:auto; }
.chart .grid { stroke:var(--rule); stroke-width:1; } .tick { fill:var(--faint); font-size:11.5px; }
.line { fill:none; stroke:currentColor; stroke-width:2; stroke-linejoin:round; stroke-linecap:round; }
.line.faint { stroke-width:1.2; opacity:.38; } .dot { fill:currentColor; stroke:var(--card); stroke-width:1.5; }
.hover { fill:currentColor; opacity:0; } .hover:hover { opacity:1; } .part { fill:currentColor; }
  .bad { fill:var(--bad); }
.track { fill:var(--track); } .mark { stroke:var(--ink); stroke-width:3; fill:none; }
.s1{color:var(--s1)} .s2{color:var(--s2)} .s3{color:var(--s3)} .s4{color:var(--s4)} .s5{color:var(--s5)}
.s6{color:var(--s6)} .s7{color:var(--s7)} .s8{color:var(--s8)}
.legend { display:flex; flex-wrap:wrap; gap:2px 16px; font-size:12.5px; color:var(--soft); margin:0 0 6px; }
.legend i { display:inline-block; width:11px; height:11px; border-radius:3px; background:currentColor;
  margin-right:6px;
  vertical-align:-1px; } .legend .ink { color:var(--soft); } .legend b { font-weight:500; color:var(--soft); }
table { border-collapse:collapse; width:100%; font-size:13.5px; } th { text-align:left; font-weight:600;
  color:var(--soft); }
th, td { padding:4px 12px 4px 0; border-bottom:1px solid var(--rule); vertical-align:top; }
tr:last-child td { border-bottom:0; } td.n, th.n { text-align:right; font-variant-numeric:tabular-nums; }
td.key, code { font-family:ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace; font-size:12.5px; }
td.value { overflow-wrap:anywhere; } tr.set td { font-weight:600; } a { color:var(--s1); }
.columns { columns:2; column-gap:34px; } .columns table { break-inside:avoid; margin-bottom:8px; }
@media (max-width:800px) { .columns { columns:1; } }
.tier { display:flex; justify-content:space-between; font-size:13.5px; margin-top:10px; } .tier b { font-weight:600; }
.said { display:grid; grid-template-columns:1fr 1fr; gap:14px; } @media (max-width:700px) { .said { display:block; } }
.said > div { background:var(--page); border-radius:8px; padding:10px 13px; margin-bottom:8px; white-space:pre-wrap;
  overflow-wrap:anywhere; } .said small { display:block; color:var(--faint); margin-bottom:3px; }
.asked { margin:10px 0 6px; } .none { color:var(--faint); } summary { cursor:pointer; color:var(--soft);
  font-size:13.5px; }
footer { color:var(--faint); font-size:12.5px; margin-top:22px; }
@media print { body { background:#fff; } .card, .tile { break-inside:avoid; } }
"""
