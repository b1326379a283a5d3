// The theme makes a landmark of every copy button, and code that scrolls cannot be reached from the keyboard.
const mend = () => {
  for (const buttons of document.querySelectorAll(".md-code__nav")) buttons.setAttribute("role", "presentation");
  for (const code of document.querySelectorAll("pre > code")) code.tabIndex = code.scrollWidth > code.clientWidth ? 0 : -1;
};
new MutationObserver(mend).observe(document.body, {childList: true, subtree: true});
addEventListener("resize", mend);
mend();
