// SPDX-License-Identifier: Apache-2.0
// Sorts, filters and folds the table that follows <div id="board" data-filters="column,column">. Without it the table is whole, in the
// order in which it was written. It loads nothing, and keeps nothing.
(() => {
  const place = document.getElementById("board");
  if (!place) return;
  const behind = (one) => place.compareDocumentPosition(one) & Node.DOCUMENT_POSITION_FOLLOWING;
  const table = [...document.querySelectorAll("table")].find(behind);
  const titles = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const names = titles.map((cell) => cell.textContent.trim());
  const text = (row, column) => row.cells[column].textContent.trim();
  const number = (row, column) => parseFloat(text(row, column));

  // Filters: a choice for each column that is named, of the values in it.
  const chosen = new Map();
  const count = document.createElement("output");
  const first = 10; // rows in sight until all are asked for
  const more = document.createElement("button");
  more.type = "button";
  let whole = false;
  const apply = () => {
    let fits = 0;
    for (const row of body.rows) {
      const left = [...chosen].some(([column, value]) => value && text(row, column) !== value);
      fits += !left;
      row.hidden = left || (!whole && fits > first);
    }
    count.textContent = `${fits} of ${rows.length} rows`;
    more.hidden = fits <= first;
    more.textContent = whole ? `Show the first ${first}` : `Show all ${fits}`;
  };
  more.addEventListener("click", () => {
    whole = !whole;
    apply();
  });
  for (const name of place.dataset.filters.split(",")) {
    const column = names.indexOf(name);
    const label = document.createElement("label");
    const select = document.createElement("select");
    select.add(new Option("all", ""));
    for (const value of new Set(rows.map((row) => text(row, column)))) {
      if (value) select.add(new Option(value, value));
    }
    select.addEventListener("change", () => {
      chosen.set(column, select.value);
      apply();
    });
    label.append(`${name} `, select);
    place.append(label);
  }
  place.append(count, more);

  // Titles sort: numbers from the largest, texts from A, and the other way round when pressed again. Empty cells stay last.
  titles.forEach((cell, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...cell.childNodes);
    cell.append(button);
    const filled = rows.filter((row) => text(row, column));
    const numeric = filled.length > 0 && filled.every((row) => !Number.isNaN(number(row, column)));
    button.addEventListener("click", () => {
      const natural = numeric ? "descending" : "ascending";
      const other = numeric ? "ascending" : "descending";
      const order = cell.getAttribute("aria-sort") === natural ? other : natural;
      titles.forEach((one) => one.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const compare = numeric
        ? (a, b) => number(a, column) - number(b, column)
        : (a, b) => text(a, column).localeCompare(text(b, column));
      const empty = rows.filter((row) => !text(row, column));
      body.append(...filled.sort((a, b) => sign * compare(a, b)), ...empty);
      apply();
    });
  });
  apply();
})();
