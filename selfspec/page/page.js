// Starts the sections; charts follow the window.

at("made-by").textContent = DATA.made_by;
startExplain();
startPredict();
startCompare();
let resizing = 0;
window.addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = window.setTimeout(() => {
    showPrediction();
    if (DATA.comparisons.length) showCompare();
  }, 150);
});
