// The page's side of RunTable: rows with a box to tick and a button to open, under heads that sort.

export default {
  render({ model, el }) {
    const make = (name, attributes, parent) => {
      const node = document.createElement(name);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      return parent.appendChild(node);
    };
    const set = (name, value) => {
      model.set(name, value);
      model.save_changes();
    };
    const table = make("table", { class: "wb-ranked wb-runs" }, el);

    const sort = (column) => {
      const [now, down] = model.get("order");
      set("order", [column, now === column ? !down : false]);
    };
    const tick = (name, on) => set("ticked", [...model.get("ticked").filter((other) => other !== name), ...(on ? [name] : [])]);

    const heads = () => {
      const row = make("tr", {}, make("thead", {}, table));
      make("th", { scope: "col" }, row);
      const [sorted, down] = model.get("order");
      for (const title of model.get("heads")) {
        const on = title === sorted;
        const head = make("th", { scope: "col", "aria-sort": on ? (down ? "descending" : "ascending") : "none" }, row);
        const button = make("button", { type: "button", "data-key": `head ${title}`, title: `sort by ${title}` }, head);
        button.textContent = on ? `${title} ${down ? "▾" : "▴"}` : title;
        button.onclick = () => sort(title);
      }
    };

    const show = () => {
      const focused = table.contains(document.activeElement) ? document.activeElement.dataset.key : null;
      table.replaceChildren();
      heads();
      const body = make("tbody", {}, table);
      const ticked = model.get("ticked");
      for (const [name, ...cells] of model.get("rows")) {
        const row = make("tr", {}, body);
        const opened = name === model.get("opened");
        row.classList.toggle("wb-chosen", opened);
        const label = { type: "checkbox", "aria-label": `compare ${name}`, "data-key": `tick ${name}` };
        const box = make("input", label, make("td", {}, row));
        box.checked = ticked.includes(name);
        box.onclick = (event) => event.stopPropagation();
        box.onchange = () => tick(name, box.checked);
        const open = { type: "button", "aria-pressed": opened, "data-key": `open ${name}`, title: name };
        const button = make("button", open, make("th", { scope: "row" }, row));
        button.textContent = name;
        cells.forEach((text) => (make("td", { title: text }, row).textContent = text));
        row.onclick = () => set("opened", opened ? "" : name);
      }
      if (focused) [...table.querySelectorAll("[data-key]")].find((node) => node.dataset.key === focused)?.focus({ preventScroll: true });
    };

    show();
    const changes = "change:heads change:rows change:order change:opened change:ticked";
    model.on(changes, show);
    return () => model.off(changes, show);
  },
};
