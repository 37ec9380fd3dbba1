// A file that is dropped or pasted anywhere goes to the one input, and arrow keys on the slider end as a pointer does.
() => {
  const put = async (files) => {
    const box = document.querySelector("#tokenprune-file");
    box.querySelector("button[aria-label='Clear'], button[aria-label='Remove this file']")?.click();
    for (let tries = 0; tries < 40; tries++) {
      const input = box.querySelector("input[type=file]");
      if (input) {
        const one = new DataTransfer();
        one.items.add(files[0]);
        input.files = one.files;
        input.dispatchEvent(new Event("change", { bubbles: true }));
        return;
      }
      await new Promise((done) => setTimeout(done, 50));
    }
  };
  const take = (event, files) => {
    if (!files?.length) return;
    event.preventDefault();
    event.stopPropagation();
    put(files);
  };
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => take(event, event.dataTransfer?.files), true);
  document.addEventListener("paste", (event) => take(event, event.clipboardData?.files), true);
  document.addEventListener("keyup", (event) => {
    if (event.target.type === "range" && event.key !== "Tab")
      event.target.dispatchEvent(new PointerEvent("pointerup", { bubbles: true }));
  });
}
