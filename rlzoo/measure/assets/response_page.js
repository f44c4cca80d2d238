const table = document.querySelector("table");
const responses = [...document.querySelectorAll("section")];
table.tHead.addEventListener("click", event => {
  const button = event.target.closest("button");
  if (!button) return;
  const column = button.parentElement.cellIndex, down = button.getAttribute("aria-sort") !== "descending";
  table.tHead.querySelectorAll("button").forEach(other => other.removeAttribute("aria-sort"));
  button.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = row => Number(row.cells[column].dataset.value);
  const rows = [...table.tBodies[0].rows].sort((one, other) => (down ? -1 : 1) * (value(one) - value(other)));
  table.tBodies[0].append(...rows);
});
function next(elements, forward, margin = 60) {
  const top = element => element.getBoundingClientRect().top;
  const found = forward ? elements.find(element => top(element) > margin) : elements.findLast(element => top(element) < -5);
  if (found) found.scrollIntoView();
}
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "j") next(responses, true);
  if (event.key === "k") next(responses, false);
  if (event.key === "c") next([...document.querySelectorAll("section i.c")], true, 125);
});
// in MLflow, the page is in a frame whose address cannot change, so that a link within the page would do nothing
document.addEventListener("click", event => {
  const link = event.target.closest("a[href^='#']");
  if (!link) return;
  event.preventDefault();
  const target = document.querySelector(link.getAttribute("href")) ?? document.documentElement; // #top has no element
  target.scrollIntoView();
});
