"use strict";
// Draws the charts of a page, anew where its colours change. `pimflow.views` has their views by name.
const pimflow = { views: {}, onTheme: [] };
pimflow.data = (name) => JSON.parse(document.getElementById(name).textContent);
pimflow.theme = () =>
  document.documentElement.dataset.theme ||
  (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

pimflow.draw = async function () {
  const theme = pimflow.theme();
  const options = {
    config: pimflow.data("themes")[theme],
    renderer: "svg",
    tooltip: { theme },
    logLevel: vega.Error,
    ast: true, // expressions are interpreted: the page's policy lets nothing make code of text
    actions: { export: true, source: false, compiled: false, editor: false },
  };
  for (const [name, chart] of Object.entries(pimflow.data("charts"))) {
    const place = document.getElementById(name);
    if (pimflow.views[name]) pimflow.views[name].finalize();
    pimflow.views[name] = (await vegaEmbed(place, chart, options)).view;
  }
  for (const told of pimflow.onTheme) told(theme);
  document.documentElement.dataset.drawn = theme;
};

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", pimflow.draw);
pimflow.drawn = pimflow.draw();
