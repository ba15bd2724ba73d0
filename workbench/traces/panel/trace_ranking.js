// The page's side of RankedList: a table whose rows are chosen by a click or by keys.

export default {
  render({ model, el }) {
    const make = (name, attributes, parent) => {
      const node = document.createElement(name);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      return parent.appendChild(node);
    };
    const table = make("table", { class: "wb-ranked" }, el);

    const choose = (name) => {
      model.set("chosen", name === model.get("chosen") ? "" : name);
      model.save_changes();
    };

    const show = () => {
      const focused = table.contains(document.activeElement) ? document.activeElement.dataset.name : null;
      table.replaceChildren();
      const head = make("tr", {}, make("thead", {}, table));
      for (const title of model.get("heads")) make("th", { scope: "col" }, head).textContent = title;
      const body = make("tbody", {}, table);
      model.get("rows").forEach(([name, ...cells], number) => {
        const row = make("tr", {}, body);
        const chosen = name === model.get("chosen");
        row.classList.toggle("wb-chosen", chosen);
        const button = make("button", { type: "button", "aria-pressed": chosen, title: name, "data-name": name }, make("th", { scope: "row" }, row));
        const plain = name.replace(/^autograd::engine::evaluate_function: /, "node ");
        button.textContent = plain.length > 36 ? `${plain.slice(0, 22)}…${plain.slice(-12)}` : plain;
        button.tabIndex = number ? -1 : 0;
        cells.forEach((text) => (make("td", {}, row).textContent = text));
        row.onclick = () => choose(name);
        if (name === focused) button.focus();
      });
    };

    table.onkeydown = (event) => {
      const all = [...table.querySelectorAll("button")];
      const here = all.indexOf(event.target);
      const to = { ArrowDown: here + 1, ArrowUp: here - 1, Home: 0, End: all.length - 1 }[event.key];
      if (to === undefined || here < 0) return;
      event.preventDefault();
      event.stopPropagation(); // the notebook has its own use for these keys
      const next = all[Math.min(Math.max(to, 0), all.length - 1)];
      for (const one of all) one.tabIndex = one === next ? 0 : -1;
      next.focus();
    };

    show();
    model.on("change:rows change:chosen change:heads", show);
    return () => model.off("change:rows change:chosen change:heads", show);
  },
};
