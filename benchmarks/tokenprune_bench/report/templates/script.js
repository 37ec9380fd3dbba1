"use strict";
// The page is whole without this: it lights up one method everywhere, and sorts tables.
(() => {
  let pinned = null;
  const buttons = new Map();

  const light = (tag) => {
    document.body.classList.toggle("focused", tag !== null);
    for (const one of document.querySelectorAll("[data-tags]")) {
      one.classList.toggle("on", tag !== null && one.dataset.tags.split(" ").includes(tag));
    }
  };

  for (const item of document.querySelectorAll(".legend li")) {
    const tag = item.dataset.show;
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    button.append(...item.childNodes);
    item.append(button);
    buttons.set(button, tag);
    button.addEventListener("mouseenter", () => light(tag));
    button.addEventListener("mouseleave", () => light(pinned));
    button.addEventListener("click", () => {
      pinned = pinned === tag ? null : tag;
      buttons.forEach((own, each) => each.setAttribute("aria-pressed", String(own === pinned)));
      light(pinned);
    });
  }

  // "256 → 64" is sorted by what is left, "12.5 [..]" by its first number, sizes by their unit; nothing comes last.
  const value = (cell) => {
    const text = cell.textContent.split("→").pop();
    const found = text.match(/[-+]?\d+(\.\d+)?(e[-+]?\d+)?/i);
    return found === null ? null : Number(found[0]) * (text.includes("MiB") ? 1024 : 1);
  };

  const compare = (a, b, column) => {
    if (column === 0) return a.cells[0].textContent.localeCompare(b.cells[0].textContent);
    return value(a.cells[column]) - value(b.cells[column]);
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    const body = table.tBodies[0];
    const original = [...body.rows];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.title = "Sort";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        // First click: numbers from the largest, names from A. Then the other way round, then as they were.
        const ways = column === 0 ? ["ascending", "descending", null] : ["descending", "ascending", null];
        const way = ways[(ways.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
        heads.forEach((one) => one.removeAttribute("aria-sort"));
        table.classList.toggle("sorted", way !== null);
        let rows = original;
        if (way !== null) {
          head.setAttribute("aria-sort", way);
          const empty = (row) => column > 0 && value(row.cells[column]) === null;
          const sign = way === "ascending" ? 1 : -1;
          const full = original.filter((row) => !empty(row)).sort((a, b) => sign * compare(a, b, column));
          rows = [...full, ...original.filter(empty)];
        }
        body.append(...rows);
      });
    });
  }
})();
