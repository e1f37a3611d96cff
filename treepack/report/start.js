// The start of the page about sharing.

startTheme();
redrawOnResize();
await startExplorer();
document.documentElement.dataset.explorer = "ready";
await loadVega();
for (const [name, spec] of Object.entries(page.charts)) await drawChart(name, spec);
document.documentElement.dataset.charts = "ready";
